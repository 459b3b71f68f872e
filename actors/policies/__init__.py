"""Policies: what completes tokens."""
