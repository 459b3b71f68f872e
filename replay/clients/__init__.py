"""Clients of replay, one for each kind of peer."""
