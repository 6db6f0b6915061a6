"""Compute and name the structure of blocks and of whole models: classes of layers and shapes of weights."""

import hashlib
import json

from torch import nn

from .environment import environment


def short_name(block: str, structure: tuple) -> str:
    """A hash of a block's class and structure, the same in every process: without the names of Python modules, as those of a
    custom pack depend on the pack's folder."""
    layers, *tensors = structure
    layers = tuple((name, *rest) for name, _module, *rest in layers)
    text = json.dumps([environment(), block, layers, tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def name_of(network: nn.Module) -> str:
    """The name under which the choices of a whole network are kept."""
    return short_name(type(network).__name__, structure_of(network))


def structure_of(block: nn.Module) -> tuple:
    """What must be equal for blocks to share graphs: classes of the layers, options that are None, and shapes of the weights;
    sorted, as ComfyUI creates weights and biases in another order under dynamic VRAM (comfy/ops.py)."""
    layers = tuple((name, type(m).__module__, type(m).__qualname__, _absent(m)) for name, m in block.named_modules())
    weights = sorted((name, tuple(p.shape)) for name, p in block.named_parameters())
    buffers = sorted((name, tuple(b.shape)) for name, b in block.named_buffers())
    return layers, tuple(weights), tuple(buffers)


def _absent(module: nn.Module) -> tuple[str, ...]:
    """Attributes of a composite layer that are None (no attention window). Leaves are left out: ComfyUI keeps state on them."""
    if not module._modules:
        return ()
    return tuple(sorted(name for name, value in vars(module).items() if value is None and not name.startswith("_")))
