"""Learner: off-policy GRPO steps on the batches that replay hands out."""
