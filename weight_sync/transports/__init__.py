"""Ways of tensors from the learner to the actors."""
