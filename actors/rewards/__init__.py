"""Rewards: numbers of finished rollouts."""
