"""Several ranks of one learner."""
