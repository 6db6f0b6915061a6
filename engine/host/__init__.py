"""Connect the engine with ComfyUI, which `host/` alone imports. May import: the modules of `engine/`. See `adapter.py`."""
