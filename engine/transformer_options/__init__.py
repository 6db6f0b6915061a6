"""Filter the host's `transformer_options`, and keep patches out of graphs.

May import: the modules of `engine/`. Door: `filter.OptionsFilter`.
"""
