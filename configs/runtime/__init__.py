"""Processes, files and signals, as every package uses them."""
