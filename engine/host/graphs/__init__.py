"""Replay calls of the host's model from CUDA graphs where that pays. May import: `host/weights` and the floors below."""
