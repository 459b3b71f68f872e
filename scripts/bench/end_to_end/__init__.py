"""One work, trained by several schedules."""
