"""A run's pace, reckoned before it is started."""
