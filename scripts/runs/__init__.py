"""Read what runs have left."""
