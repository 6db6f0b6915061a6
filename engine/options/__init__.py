"""What of ComfyUI's `transformer_options` a block is given: what its code and the patches in it may read.

Knows the host's names, imports none of its modules. May import: the modules of `engine/`. Door: `filter.OptionsFilter`.
"""
