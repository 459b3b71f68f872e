"""The numbers of a run, and the trackers that show them."""
