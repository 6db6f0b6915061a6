"""Read and normalize the shapes and memory layouts of a block's arguments, and undo what a failed call changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..channels_last import function_mode
from ..failures.describe import is_out_of_memory
from ..tensor_spec import TensorSpec
from ..torch_compat import private
from ..torch_settings import modes, numerics


def tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """All tensors among the arguments, except those in `transformer_options`."""
    values = [*args, *(v for k, v in kwargs.items() if k != "transformer_options")]
    return [leaf for leaf in private.pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def shapes_of(args: tuple, kwargs: dict) -> tuple:
    """Shapes of all tensors among the arguments, those in lists and tuples included."""
    shapes = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            # Another layout needs another graph.
            shapes.append(value.shape if value.is_contiguous() else (value.shape, value.stride()))
        elif isinstance(value, list | tuple):
            shapes.extend(v.shape for v in tensors_in((value,), {}))
    return tuple(shapes)


def traced_state(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    """What the code of a call depends on, except the values of numbers: arguments, weights, settings of PyTorch."""
    tensors = (*module.parameters(), *module.buffers())
    weights = ((type(t), t.dtype, t.device, t.layout is torch.strided and t.stride()) for t in tensors)
    inputs = ((t.dtype, t.device, t.is_inference()) for t in tensors_in(args, kwargs))
    leaves = private.pytree.tree_leaves((args, kwargs))
    kinds = tuple(leaf if isinstance(leaf, bool | str) else type(leaf) for leaf in leaves)
    return shapes_of(args, kwargs), tuple(weights), tuple(inputs), kinds, modes(), numerics()


@contextmanager
def static_heads(args: tuple, kwargs: dict) -> Iterator[None]:
    """A context in which heads and pairs of rotary embeddings `[batch, tokens, heads, pairs, 2, 2]` are constants for Dynamo.

    With symbols for both (LTX-AV), sympy takes four fifths of the trace to divide the channels by heads and multiply by pairs.
    """
    rotary = [t for t in tensors_in(args, kwargs) if t.dim() == 6 and t.shape[-2:] == (2, 2) and t.shape[1] > 1]
    marked = [tensor for tensor in rotary if not any(hasattr(tensor, mark) for mark in private.STATIC_MARKS)]
    for tensor in marked:
        # Not by `mark_static`: PyTorch 2.15 takes a call of that function when a trace begins for a part of the trace.
        vars(tensor).update(zip(private.STATIC_MARKS, ({2, 3}, True), strict=True))
    try:
        yield
    finally:
        for tensor in marked:
            for mark in private.STATIC_MARKS:
                vars(tensor).pop(mark, None)


class Changed:
    """Copy the tensors in `call` (args, kwargs), and restore them after a call with these arguments has failed halfway."""

    def __init__(self, call: tuple):
        self._call = call
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = []
        self._is_kept = False

    def keep(self) -> None:
        """Copy all tensors, in the first call of this method. If memory is too short for that, nothing can be put back."""
        if self._is_kept:
            return
        self._is_kept, self._kept = True, None
        try:
            tensors = {id(t): t for t in tensors_in(*self._call)}
            self._kept = [(t, memory_of(t).clone()) for t in tensors.values()]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise

    @property
    def has_copies(self) -> bool:
        return bool(self._kept)

    @property
    def can_be_put_back(self) -> bool:
        return self._kept is not None

    def put_back(self) -> bool:
        """Restore the tensors; returns whether that was possible."""
        for tensor, copy in self._kept or ():
            memory = memory_of(tensor)
            if not torch.equal(memory, copy):
                memory.copy_(copy)
        return self.can_be_put_back


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a flat tensor, with each element once: PyTorch writes to no expanded or overlapping tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.detach()
    return tensor.detach().as_strided((TensorSpec.of(tensor).extent,), (1,))


def copied_containers(value: Any) -> Any:
    """The same tensors in new lists and dicts: the host pops a ControlNet's tensors from their lists while a model runs."""
    return private.pytree.tree_map(lambda leaf: leaf, value)


def in_usual_layout(args: tuple) -> tuple[tuple, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The arguments with tensors in layouts that save graphs, and (tensor, copy) of each copied tensor that can be written to.

    Images become channels_last while `ChannelsLast` is on. The first block of a video model gets its tokens as a transposed
    view of a convolution's output. Dimensions of size 1 (a batch of one) may have strides of another layout than guards expect.
    """
    copies = {id(a): (a, copy) for a in args if (copy := _in_saving_layout(a)) is not a}
    usual = tuple(_with_usual_strides(copies[id(a)][1] if id(a) in copies else a) for a in args)
    return usual, [(tensor, copy) for tensor, copy in copies.values() if not _is_expanded(tensor)]


def _in_saving_layout(value: Any) -> Any:
    """A contiguous copy of `[batch, tokens, channels]` that is a dense view of `[batch, channels, tokens]`, an image in
    channels_last while `ChannelsLast` is on; any other value as it is."""
    if isinstance(value, torch.Tensor) and value.dim() == 3:
        return value.contiguous() if value.transpose(1, 2).is_contiguous() else value
    return function_mode.in_channels_last(value)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that the tensor cannot be written to."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _with_usual_strides(value: Any) -> Any:
    """A view of a contiguous tensor with the usual strides; any other value as it is."""
    if not isinstance(value, torch.Tensor) or 1 not in value.shape or not value.is_contiguous():
        return value
    usual = value.view(-1).view(value.shape)
    return value if value.stride() == usual.stride() else usual
