"""Actors: many multi-turn search rollouts in flight on one inference engine."""
