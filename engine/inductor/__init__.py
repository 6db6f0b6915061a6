"""What inductor is given and made to choose: kernels in the open, rewritten graphs, attention, how code is first run.

May import: `failures`, the modules of `engine/`. Door: `backend.inductor`.
"""
