"""Pure mathematics of the update."""
