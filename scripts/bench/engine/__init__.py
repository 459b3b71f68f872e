"""The engine's scheduling, its distance from the learner, and the cost of our rollouts on top of it."""
