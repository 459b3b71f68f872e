"""The state machine of leases, groups and batches."""
