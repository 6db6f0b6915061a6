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


def has_batch_of_one(shapes: tuple) -> bool:
    """Whether the first of `shapes_of` has a batch of one."""
    first = next(iter(shapes), ())
    shape = first[0] if first and isinstance(first[0], torch.Size) else first
    return tuple(shape[:1]) == (1,)


def copies(args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor among the arguments, and a copy of it."""
    return [(t, t.clone()) for t in tensors_in(args, kwargs)]


def is_transposed(tensor: torch.Tensor) -> bool:
    """Whether `[batch, tokens, channels]` is a dense view of `[batch, channels, tokens]`."""
    return tensor.dim() == 3 and not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous()
