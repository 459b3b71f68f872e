"""Retrieval server: passages for queries over HTTP, and the client for it."""
