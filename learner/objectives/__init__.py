"""Objectives: per-token losses as pure functions, one short file each."""
