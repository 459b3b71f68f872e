"""Searches of the live web: a provider, what it may cost, and the record of its answers."""
