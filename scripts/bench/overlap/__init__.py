"""How well waiting for searches is hidden."""
