"""Connect the engine with ComfyUI: the only rooms that import it. May import: `engine/`'s own modules. See `adapter.py`."""
