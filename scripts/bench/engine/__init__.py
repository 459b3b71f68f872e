"""Benchmarks of the engines beside their learner."""
