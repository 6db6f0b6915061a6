"""From blocks that are alike to compiled code, and from a call of a model to calls of that code.

May import: `background`, `blocks`, `cache`, `inductor`, `options`, `warmup`, `failures`, the modules of `engine/`. Doors:
`binding.Binding` for a call of a model, `registry.code_of` for what has been compiled of it.
"""
