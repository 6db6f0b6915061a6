"""Shapes and tensors among the arguments of a module."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree


def tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists, tuples and dicts included, but for the host's options."""
    values = [*args, *(v for k, v in kwargs.items() if k != "transformer_options")]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def shapes_of(args: tuple, kwargs: dict) -> tuple:
    """Shapes of all tensors given to a module, those in lists and tuples included."""
    shapes = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            # A layout of its own is a graph of its own.
            shapes.append(value.shape if value.is_contiguous() else (value.shape, value.stride()))
        elif isinstance(value, list | tuple):
            shapes.extend(v.shape for v in tensors_in((value,), {}))
    return tuple(shapes)


def sides_of_one(shapes: tuple) -> tuple:
    """Where the shapes of `shapes_of` have a side of 1: PyTorch makes that a constant of the code, all other sides may vary."""
    plain = [s[0] if s and isinstance(s[0], torch.Size) else s for s in shapes]
    return tuple(tuple(side == 1 for side in shape) for shape in plain)


def copies(args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor among the arguments, and a copy of it."""
    return [(t, t.clone()) for t in tensors_in(args, kwargs)]


def is_transposed(tensor: torch.Tensor) -> bool:
    """Whether `[batch, tokens, channels]` is a dense view of `[batch, channels, tokens]`."""
    return tensor.dim() == 3 and not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous()
