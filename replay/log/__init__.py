"""The event log and its readers."""
