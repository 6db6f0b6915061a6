"""Attention kernels for compiled blocks, through ComfyUI's `optimized_attention_override`.

ComfyUI asks PyTorch for flash attention first (comfy/ops.py); on Hopper and later cuDNN's kernel is nearly twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_FIRST = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# The only function of the host whose kernel may be exchanged: the user has not chosen another one (sage, xformers).
HOST_FUNCTION = "attention_pytorch"


def _override_for(kernel: str) -> Callable:
    priority = [_FIRST[kernel], *(b for b in _OTHERS if b is not _FIRST[kernel])]

    def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if func.__name__ != HOST_FUNCTION or kwargs.get("enable_gqa", False):
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
        if not skip_reshape:  # [batch, tokens, heads * width] -> [batch, heads, tokens, width]
            q, k, v = (t.view(t.shape[0], -1, heads, q.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
            mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
        with sdpa_kernel(priority, set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
        return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])

    override.__name__ = f"attention_{kernel}"
    return override


# One function per kernel: guards compare functions by identity.
_overrides = {kernel: _override_for(kernel) for kernel in _FIRST}


def override_for(attention: str) -> Callable | None:
    """The override for one of the choices of the `attention` input; None leaves the host's kernel.

    Args:
        attention: `auto`, `host`, `cudnn`, `flash` or `efficient`.
    """
    return _overrides.get(attention)
