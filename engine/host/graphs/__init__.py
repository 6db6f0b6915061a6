"""When a call of the host's model may be replayed from a CUDA graph, and whether that pays.

May import: `host/weights`, `host/`, `cuda_graphs` and what is below it. Door: `replay.graphed`.
"""
