"""The engine's scheduling, its probe in bf16, and the cost of our rollouts on top of it."""
