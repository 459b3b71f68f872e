"""The gateway beside vLLM's own server: the same calls of the same model, in turns."""
