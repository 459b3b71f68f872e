"""Corrections, and what each buys at each staleness."""
