"""Replay's socket loop."""
