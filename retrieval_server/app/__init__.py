"""Indexes: build, open, search."""
