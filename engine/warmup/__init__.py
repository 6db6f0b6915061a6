"""What a warmup runs, and the memory that it took.

May import: the modules of `engine/`. Door: `plan.parse_extra_sizes`.
"""
