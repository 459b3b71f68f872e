"""A plan beside what it is a plan of."""
