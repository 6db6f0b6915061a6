"""Run the uncompiled convolutions of a model with channels side by side in memory (channels_last), as cuDNN wants them.

For models that are captured as CUDA graphs: what runs here in Python runs once per shape, what it launches is replayed. Nothing
of the model is changed; the functions that it calls are exchanged while it runs (`torch.overrides.TorchFunctionMode`).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

SIDE_BY_SIDE = torch.channels_last
# Tensor cores take these; others are computed as they are.
DTYPES = {torch.float16, torch.bfloat16}


@dataclass
class _Waiting:
    """A group norm whose result is not written yet: a SiLU may follow, which is then done in one go."""

    x: torch.Tensor
    factors: torch.Tensor
    out: torch.Tensor


class ChannelsLast(TorchFunctionMode):
    """While it is on, 16-bit images keep channels_last through convolutions and group norms.

    Args:
        kernels: the module `group_norm_kernels`.
    """

    def __init__(self, kernels: types.ModuleType):
        super().__init__()
        self._kernels = kernels
        self._waiting: _Waiting | None = None

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waiting is not None:
            out = self._write(silu=func is functional.silu and bool(args) and args[0] is self._waiting.out)
            if out is not None:
                return out
        own = _OWN.get(func)
        return func(*args, **kwargs) if own is None else own(self, func, *args, **kwargs)

    def _write(self, silu: bool = False) -> torch.Tensor | None:
        waiting, self._waiting = self._waiting, None
        self._kernels.apply_factors(waiting.x, waiting.factors, waiting.out, silu)
        return waiting.out if silu else None

    def __enter__(self):
        _active.modes.append(self)
        return super().__enter__()

    def __exit__(self, *exc):
        if self._waiting is not None:
            self._write()
        _active.modes.pop()
        return super().__exit__(*exc)

    def _conv2d(self, func: Callable, x, weight, *rest, **kwargs):
        if not _is_image(x) or not isinstance(weight, torch.Tensor) or weight.dim() != 4 or weight.dtype != x.dtype:
            return func(x, weight, *rest, **kwargs)
        if not weight.is_contiguous(memory_format=SIDE_BY_SIDE):
            weight = self._kernels.channels_last_weight(weight.contiguous())
        return func(x.contiguous(memory_format=SIDE_BY_SIDE), weight, *rest, **kwargs)

    def _group_norm(self, func: Callable, x, num_groups, weight=None, bias=None, eps=1e-5):
        if not _is_image(x) or weight is None or bias is None:
            return func(x, num_groups, weight, bias, eps)
        x = x.contiguous(memory_format=SIDE_BY_SIDE)
        self._waiting = _Waiting(x, self._kernels.factors_of(x, num_groups, weight, bias, eps), torch.empty_like(x))
        return self._waiting.out

    def _contiguous(self, func: Callable, x, *args, **kwargs):
        """What the host's transformers make of their tokens when they are done is contiguous enough."""
        if not args and not kwargs and _is_image(x) and x.is_contiguous(memory_format=SIDE_BY_SIDE):
            return x
        return func(x, *args, **kwargs)


_OWN = {
    torch.conv2d: ChannelsLast._conv2d,
    functional.group_norm: ChannelsLast._group_norm,
    torch.Tensor.contiguous: ChannelsLast._contiguous,
}


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[ChannelsLast] = []


_active = _Active()


def is_active() -> bool:
    """Whether a mode is on, on this thread."""
    return bool(_active.modes)


@contextmanager
def paused() -> Iterator[None]:
    """Compiled code runs without it: PyTorch compiles for the modes that are on."""
    mode = _active.modes[-1]
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def turned(args: tuple) -> tuple:
    """The arguments with images channels_last: they come in either layout, and each would be a graph of its own."""
    return tuple(a.contiguous(memory_format=SIDE_BY_SIDE) if _is_image(a) else a for a in args)


def run_channels_last(kernels: types.ModuleType, forward: Callable, args: tuple, kwargs: dict) -> object:
    """`forward` with the mode on; its results in the layout that they have without it."""
    with ChannelsLast(kernels):
        result = forward(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)


def _is_image(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 4 and x.dtype in DTYPES and min(x.shape[1:]) > 1
