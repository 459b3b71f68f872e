"""Searches under load."""
