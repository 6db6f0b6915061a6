"""Shapes and memory layouts of what a block is called with: what its graphs depend on."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")


def tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """All tensors given to a module, those of `transformer_options` left out."""
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


class Changed:
    """What a call that fails halfway has changed of its arguments, put back.

    Args:
        call: positional and keyword arguments; an empty tuple where nothing will run.
    """

    def __init__(self, call: tuple):
        self._call = call
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = []

    def keep(self) -> None:
        """Copy all tensors as they are now; without the memory for that, nothing can be put back."""
        try:
            found = {id(t): t for t in (tensors_in(*self._call) if self._call else ())}
            self._kept = [(t, memory_of(t).clone()) for t in found.values()]
        except torch.OutOfMemoryError:
            self._kept = None

    def put_back(self) -> bool:
        """Whether all is as it was kept."""
        for tensor, copy in self._kept or ():
            memory = memory_of(tensor)
            if not torch.equal(memory, copy):
                memory.copy_(copy)
        return self._kept is not None


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a tensor looks at, each once: expanded and overlapping ones cannot be written to themselves."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.detach()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((reach,), (1,))


def copied_containers(value: T) -> T:
    """The same tensors in new lists and dicts: the host takes a ControlNet's out of their lists while a model runs."""
    return pytree.tree_map(lambda leaf: leaf, value)


def is_transposed(tensor: torch.Tensor) -> bool:
    """Whether `[batch, tokens, channels]` is a dense view of `[batch, channels, tokens]`."""
    return tensor.dim() == 3 and not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous()


def has_odd_strides(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous, but dimensions of size 1 (a batch of one) have strides of another layout."""
    return 1 in tensor.shape and tensor.is_contiguous() and tensor.stride() != _strides_for(tensor.shape)


def with_usual_strides(value: object) -> object:
    """The same memory with the strides that guards expect of a contiguous tensor."""
    if isinstance(value, torch.Tensor) and has_odd_strides(value):
        return value.as_strided(value.shape, _strides_for(value.shape))
    return value


def _strides_for(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
