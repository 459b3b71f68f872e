"""The demo: world, model, run."""
