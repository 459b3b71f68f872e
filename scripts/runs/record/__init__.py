"""A reader of a run's record that shares no code with replay: docs/records.md, read anew."""
