"""Capture and replay a whole model. May import: `compile` and the floors below. Door: `capture.graphs_of`."""
