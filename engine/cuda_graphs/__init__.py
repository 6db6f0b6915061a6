"""CUDA graphs over a whole model: capture and replay, what tells two calls apart, the norm's kernels.

May import: `compile` and what is below it. Door: `capture.graphs_of`.
"""
