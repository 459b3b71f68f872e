"""The learner's credit, its critic, its KL to an anchor, and what else is off by default."""
