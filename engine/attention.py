"""Attention kernels for compiled blocks, through ComfyUI's `optimized_attention_override`.

ComfyUI asks PyTorch for flash attention first (comfy/ops.py); on Hopper cuDNN's kernel is nearly twice as fast. Which one
is the fastest depends on card, shape and dtype, so `auto` measures them once on what the model really asks for.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import InvalidSetting

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The only function of the host whose kernel may be exchanged: the user has not chosen another one (sage, xformers).
HOST_FUNCTION = "attention_pytorch"
# Fewer than this share of time saved is noise.
_WORTHWHILE = 0.95
_REPEATS = 5
# Bytes, and how often: together a millisecond or more.
_FILLER, _FILLS = 2**26, 40
# Of the arithmetic of all calls, what is measured.
_SHARE = 0.9


def override_with(priority: list[SDPBackend]) -> Callable:
    """An override that asks for these kernels in their order, and raises RuntimeError where none of them can run."""

    def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if func.__name__ != HOST_FUNCTION or kwargs.get("enable_gqa", False):
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
        q, k, v, mask = _as_sdpa(q, k, v, heads, mask, skip_reshape)
        with sdpa_kernel(priority, set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
        return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])

    override.__name__ = f"attention_{priority[0].name.removesuffix('_ATTENTION').lower()}"
    return override


def _as_sdpa(q, k, v, heads, mask, skip_reshape):
    """To `[batch, heads, tokens, width]`, the mask with batch and heads (comfy/ldm/modules/attention.py)."""
    if not skip_reshape:
        q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    return q, k, v, mask


# One function per kernel: guards compare functions by identity. What the first cannot run, the others do.
_overrides = {
    kernel: override_with([first, *(b for b in KERNELS.values() if b is not first), SDPBackend.MATH])
    for kernel, first in KERNELS.items()
}


def override_for(kernel: str) -> Callable | None:
    """The override that asks for `kernel` first; None for `host`."""
    return _overrides.get(kernel)


@dataclass(frozen=True)
class _Layout:
    """A tensor's shape and place in memory, without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def zeros(self) -> torch.Tensor:
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return torch.zeros(extent, dtype=self.dtype, device=self.device).as_strided(self.shape, self.stride)


# Queries, keys, values, mask, and the scale.
_Call = tuple[_Layout, _Layout, _Layout, _Layout | None, float | None]


@dataclass
class AttentionSurvey:
    """Runs as an override through one eager call of a model and notes what it asks for; `best` times the kernels on that.

    Args:
        wanted: an explicit choice that must be possible, or `auto`.
        complete: there was the memory to measure all of it.
    """

    wanted: str
    calls: Counter[_Call] = field(default_factory=Counter)
    complete: bool = True

    def __call__(
        self, func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
    ):
        if func.__name__ == HOST_FUNCTION and not kwargs.get("enable_gqa", False):
            tensors = _as_sdpa(q, k, v, heads, mask, skip_reshape)
            call = (*(None if t is None else _Layout.of(t) for t in tensors), kwargs.get("scale"))
            if self.wanted != "auto" and call not in self.calls:
                self._try(tensors, kwargs.get("scale"))
            self.calls[call] += 1
        return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)

    def _try(self, tensors: tuple, scale: float | None) -> None:
        q, k, v, mask = tensors
        try:
            with sdpa_kernel([KERNELS[self.wanted]]):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            shape = "x".join(map(str, q.shape))
            raise InvalidSetting(
                "attention", self.wanted, f"this card cannot run it for {shape} {q.dtype}; set attention to auto."
            ) from error

    def best(self) -> str:
        """The kernel with the least time over the calls that matter; `host` when nothing beats what the host asks for first.

        What the fastest cannot run (a short prompt) is left to the next one, as the host does.
        """
        if self.wanted != "auto":
            return self.wanted
        chosen = _costliest(self.calls)
        try:
            totals = {name: sum(count * _seconds(name, call) for call, count in chosen.items()) for name in KERNELS}
        except torch.OutOfMemoryError:
            self.complete = False
            return "host"
        fastest = min(totals, key=totals.get)
        if not chosen or totals[fastest] == float("inf"):
            return "host"
        return fastest if totals[fastest] < _WORTHWHILE * totals["flash"] else "host"


def _costliest(calls: Counter[_Call]) -> dict[_Call, int]:
    """The calls that make up most of the work: for each shape cuDNN makes a plan, which takes far longer than a call."""

    def work(call: _Call) -> int:
        (batch, heads, tokens, width), keys = call[0].shape, call[1].shape[2]
        return calls[call] * batch * heads * tokens * width * keys

    total, covered, chosen = sum(map(work, calls)), 0, {}
    for call in sorted(calls, key=work, reverse=True):
        if covered >= _SHARE * total:
            break
        chosen[call] = calls[call]
        covered += work(call)
    return chosen


def _seconds(kernel: str, call: _Call) -> float:
    """Seconds of one call on the GPU alone: in small models launching takes longer, and would be all that is measured.

    Returns:
        Infinity where the kernel cannot run it.
    """
    *layouts, scale = call
    try:
        with torch.cuda.device(layouts[0].device), sdpa_kernel([KERNELS[kernel]]):
            q, k, v, mask = (None if layout is None else layout.zeros() for layout in layouts)
            attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, attn_mask=mask, scale=scale)
            return _seconds_on_gpu(attend)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return float("inf")


def _seconds_on_gpu(function: Callable[[], object]) -> float:
    function()  # what it sets up once is not measured
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    filler = torch.empty(_FILLER, dtype=torch.uint8, device="cuda")
    for _ in range(_FILLS):  # while the GPU does this, all calls are launched
        filler.zero_()
    begin.record()
    for _ in range(_REPEATS):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / _REPEATS
