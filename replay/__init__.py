"""Replay: the exactly-once stream of trajectories between actors and learner."""
