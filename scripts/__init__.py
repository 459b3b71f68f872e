"""The composition root: commands that put the packages together."""
