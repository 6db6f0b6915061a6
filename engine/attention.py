"""Attention kernels for compiled blocks, through ComfyUI's `optimized_attention_override`.

ComfyUI asks PyTorch for flash attention first (comfy/ops.py); on Hopper cuDNN's kernel is nearly twice as fast. Which one
is the fastest depends on card, shape and dtype, so `auto` measures them once on what the model really asks for.
"""

from __future__ import annotations

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
_WARMUP, _REPEATS = 2, 5


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


@dataclass
class AttentionSurvey:
    """Runs as an override through one eager call of a model, and times the kernels on what it asks for.

    Args:
        wanted: an explicit choice that must be possible, or `auto`.
    """

    wanted: str
    calls: Counter = field(default_factory=Counter)
    # What this process has measured: (device, dtype, shapes) -> kernel -> seconds.
    measured: dict = field(default_factory=dict)

    def __call__(
        self, func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
    ):
        if func.__name__ == HOST_FUNCTION and not kwargs.get("enable_gqa", False):
            tensors = _as_sdpa(q, k, v, heads, mask, skip_reshape)
            key = (q.device, q.dtype, *(None if t is None else tuple(t.shape) for t in tensors))
            self.calls[key] += 1
            if key not in self.measured:
                self.measured[key] = self._time_all(tensors, kwargs.get("scale"))
        return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)

    def _time_all(self, tensors: tuple, scale: float | None) -> dict[str, float]:
        times = {}
        for name, backend in KERNELS.items():
            if self.wanted not in ("auto", name):
                continue
            try:
                times[name] = _seconds(backend, tensors, scale)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                if self.wanted == name:
                    shape = "x".join(map(str, tensors[0].shape))
                    raise InvalidSetting(
                        "attention", name, f"this card cannot run it for {shape} {tensors[0].dtype}; set attention to auto."
                    ) from error
        return times

    def best(self) -> str:
        """The kernel with the least time over all calls; `host` when nothing beats what the host asks for first."""
        if self.wanted != "auto":
            return self.wanted
        totals = {
            name: sum(count * self.measured[key].get(name, float("inf")) for key, count in self.calls.items())
            for name in KERNELS
        }
        # A kernel that cannot run some shape leaves that to the next one, as the host does.
        possible = {name: seconds for name, seconds in totals.items() if 0 < seconds < float("inf")}
        if not possible:
            return "host"
        fastest = min(possible, key=possible.get)
        as_host = possible.get("flash", float("inf"))
        return fastest if possible[fastest] < _WORTHWHILE * as_host else "host"


def _seconds(backend: SDPBackend, tensors: tuple, scale: float | None) -> float:
    q, k, v, mask = tensors
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with sdpa_kernel([backend]):
        for index in range(_WARMUP + _REPEATS):
            if index == _WARMUP:
                begin.record()
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / _REPEATS
