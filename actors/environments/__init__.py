"""Environments: how a policy acts, turn by turn."""
