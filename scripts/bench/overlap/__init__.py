"""The benchmark of how well waiting for searches is hidden."""
