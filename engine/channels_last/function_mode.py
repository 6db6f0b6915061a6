"""Run the uncompiled convolutions of a model in channels_last, as cuDNN wants them.

For models that are captured as CUDA graphs, where this Python code runs once per shape, and for VAEs, whose calls are long. The
model does not change: a `torch.overrides.TorchFunctionMode` overrides the functions that the model calls.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..torch_compat import private
from .preparing import kernels

# By number of dimensions: images, videos.
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
# The types that tensor cores take. Tensors of other types keep their layout.
DTYPES = {torch.float16, torch.bfloat16}
# The kernels count an image's values in 32 bits; a decoder of 4096x4096 pixels has images of more values.
MOST_VALUES = 2**31 - 1


@dataclass
class _Waiting:
    """A group norm whose result is not written yet, and never is if only a SiLU reads the result: both then run as one."""

    x: torch.Tensor
    factors: torch.Tensor
    out: weakref.ref[torch.Tensor]


class ChannelsLast(TorchFunctionMode):
    """While the mode is on, 16-bit images keep channels_last through convolutions and norms; with `video`, videos do too."""

    def __init__(self, video: bool = False):
        super().__init__()
        self._video = video
        self._waiting: _Waiting | None = None
        self._outer: ChannelsLast | None = None

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waiting is not None:
            of_norm = func is functional.silu and bool(args) and args[0] is self._waiting.out()
            if of_norm and not kwargs.get("inplace") and args[1:2] != (True,):
                return self._silu(self._waiting)
            self._write(self._waiting)
        override = _OVERRIDES.get(func)
        return func(*args, **kwargs) if override is None else override(self, func, *args, **kwargs)

    def _silu(self, norm: _Waiting) -> torch.Tensor:
        result = torch.empty_like(norm.x)
        kernels().apply_factors(_as_image(norm.x), norm.factors, _as_image(result), True)
        return result

    def _write(self, norm: _Waiting) -> None:
        """Write the norm's result, unless it was freed."""
        self._waiting = None
        out = norm.out()
        if out is not None:
            kernels().apply_factors(_as_image(norm.x), norm.factors, _as_image(out), False)

    def __enter__(self):
        self._outer, _of_thread.mode = _active(), self
        return super().__enter__()

    def __exit__(self, error_type, *error):
        try:
            if self._waiting is not None and error_type is None:
                self._write(self._waiting)
        finally:
            self._waiting = None
            _of_thread.mode = self._outer
            super().__exit__(error_type, *error)

    def _takes(self, x: object) -> bool:
        return _is_image(x) or (self._video and _is_image(x, 5))

    def _convolution(self, func: Callable, input, weight, *rest, **kwargs):
        fits = isinstance(weight, torch.Tensor) and weight.dtype == input.dtype and weight.dim() == input.dim()
        if not self._takes(input) or not fits:
            return func(input, weight, *rest, **kwargs)
        layout = _LAYOUTS[input.dim()]
        if not weight.is_contiguous(memory_format=layout):
            shape = weight.shape
            weight = kernels().channels_last_weight(_as_image(weight.contiguous()))
            weight = weight if len(shape) == 4 else weight.unflatten(2, shape[2:4])
        return func(input.contiguous(memory_format=layout), weight, *rest, **kwargs)

    def _group_norm(self, func: Callable, input, num_groups, weight=None, bias=None, eps=1e-5):
        if not self._takes(input) or weight is None or bias is None or input[0].numel() > MOST_VALUES:
            return func(input, num_groups, weight, bias, eps)
        x = input.contiguous(memory_format=_LAYOUTS[input.dim()])
        out = torch.empty_like(x)
        factors = kernels().factors_of(_as_image(x), num_groups, weight, bias, eps)
        self._waiting = _Waiting(x, factors, weakref.ref(out))
        return out

    def _contiguous(self, func: Callable, x, *args, **kwargs):
        """Return an image in channels_last as it is: the host's transformers end with `contiguous`, for instance."""
        if not args and not kwargs and _is_image(x) and x.is_contiguous(memory_format=torch.channels_last):
            return x
        return func(x, *args, **kwargs)


_OVERRIDES: dict[Callable, Callable] = {
    torch.conv2d: ChannelsLast._convolution,
    torch.conv3d: ChannelsLast._convolution,
    torch.cudnn_convolution: ChannelsLast._convolution,  # the host's workaround for a bug of cuDNN (comfy/ops.py)
    functional.group_norm: ChannelsLast._group_norm,
    torch.Tensor.contiguous: ChannelsLast._contiguous,
}


_of_thread = threading.local()


def _active() -> ChannelsLast | None:
    return getattr(_of_thread, "mode", None)


@contextmanager
def paused() -> Iterator[None]:
    """Switch the mode off, if it is on, around compiled code: Dynamo would trace the mode, and guard on it."""
    mode = _active()
    if mode is None:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def in_channels_last(value: Any) -> Any:
    """`value`, an argument or result of a block; in channels_last if the mode is on and `value` is an image: this copy saves
    one in each of the next layers."""
    return value.contiguous(memory_format=torch.channels_last) if _active() is not None and _is_image(value) else value


def run_channels_last(forward: Callable, args: tuple, kwargs: dict, video: bool = False) -> object:
    """Run `forward` with the mode on; its results are contiguous, as without the mode."""
    with ChannelsLast(video):
        result = forward(*args, **kwargs)
    return private.pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)


def _is_image(x: object, dimensions: int = 4) -> bool:
    if not isinstance(x, torch.Tensor) or x.dim() != dimensions or x.dtype not in DTYPES:
        return False
    return min(x.shape[1], *x.shape[-2:]) > 1


def _as_image(x: torch.Tensor) -> torch.Tensor:
    """A view of a video, or of the weight of a 3d convolution, as one image with the frames below each other."""
    return x.flatten(2, 3) if x.dim() == 5 else x
