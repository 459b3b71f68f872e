"""Evaluate a model on question sets."""
