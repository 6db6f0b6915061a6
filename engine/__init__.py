"""The engine: block-wise torch.compile for diffusion models. Rooms of plain PyTorch, and `host/`, which alone imports ComfyUI.

In this folder itself: settings and errors, what is kept per model, PyTorch's settings in scopes; they import no room.
CONTRIBUTING.md has the floors and the way of a call; devtools/rooms.py holds them.
"""
