"""The way of trajectories into the log."""
