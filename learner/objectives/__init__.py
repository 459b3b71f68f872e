"""Objectives: per-token losses as pure functions."""
