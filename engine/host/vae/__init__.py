"""Run a workflow's VAE in the faster memory layout. May import: `host/graphs` and what is below it."""
