"""The model on its ranks: engine, head, averages, state."""
