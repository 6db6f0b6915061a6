"""Which modules of a model are compiled, what blocks must share to share code, and what of a UNet stays eager.

May import: the modules of `engine/`. Door: `discovery.find_blocks`.
"""
