"""The engine: block-wise torch.compile for diffusion models.

Everything here is plain PyTorch, except the package `engine.host`, the only place that touches ComfyUI.
"""
