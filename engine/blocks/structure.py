"""What blocks must have in common to share compiled code."""

from __future__ import annotations

from torch import nn


def structure_of(block: nn.Module) -> tuple:
    """What blocks must share to share graphs: classes of the layers, what they go without, and shapes of the weights."""
    layers = tuple((name, type(m).__module__, type(m).__qualname__, _absent(m)) for name, m in block.named_modules())
    weights = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    buffers = tuple((name, tuple(b.shape)) for name, b in block.named_buffers())
    return layers, weights, buffers


def _absent(module: nn.Module) -> tuple[str, ...]:
    """Options that a composite layer does not use (a window of attention); the host keeps its own books on leaves only."""
    if not module._modules:
        return ()
    return tuple(sorted(name for name, value in vars(module).items() if value is None and not name.startswith("_")))
