"""Supervised start from demonstrations."""
