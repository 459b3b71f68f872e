"""Weight sync: the verified broadcast of policy versions from learner to actors."""
