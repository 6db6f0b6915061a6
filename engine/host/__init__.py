"""The only rooms that import ComfyUI. Written against 0.30; what differs elsewhere is detected, not assumed (`adapter.py`).

In this folder itself may be imported: the modules of `engine/`. Its rooms, from below: `weights`, `graphs`, `model`, `nodes`.
"""
