"""Readers of what runs have left: books, curve, rollouts, losses."""
