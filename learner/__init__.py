"""The learner: off-policy steps on the batches that replay delivers."""
