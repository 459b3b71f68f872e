"""A step's signs of health: gauges of its tokens and rollouts, and the rules that watch them."""
