"""Torch Compile Kit: block-wise torch.compile for ComfyUI."""

from .nodes import TorchCompileKit

WEB_DIRECTORY = "./js"


async def comfy_entrypoint() -> TorchCompileKit:
    return TorchCompileKit()
