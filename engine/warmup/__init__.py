"""What a warmup runs, and what need not be run again.

May import: the modules of `engine/`. Doors: `plan.parse_extra_sizes`, `record.WarmRecord`.
"""
