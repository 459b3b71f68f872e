"""The way of weights to the actors."""
