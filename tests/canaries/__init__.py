"""Tests of the names that PyTorch and ComfyUI do not promise."""
