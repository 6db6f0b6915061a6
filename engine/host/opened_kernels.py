"""The host's kernels (comfy-kitchen) as PyTorch code, for inductor to fuse: rotary embeddings and adaptive norms.

Their meaning is that of comfy_kitchen/backends/eager/{rope,adaln}.py; code that works in place there is out of place here.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..inductor import REPLACEMENTS


def rope1(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours.

    Args:
        x: `[..., tokens, head_dim]` or `[..., tokens, heads, head_dim]`.
        freqs: `[..., head_dim / 2, 2, 2]`, a rotation a pair; more tokens than those of `x` are cut off at dimension 2.
    """
    pairs = x.to(freqs.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    freqs = _trimmed(x, freqs)
    return (freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def rope_split_half1(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of which one is in the first half of the head and one in the second."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).movedim(-2, -1).unsqueeze(-2).to(freqs.dtype)
    rotated = freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]
    return rotated.movedim(-1, -2).reshape(x.shape).type_as(x)


def _trimmed(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    if x.ndim > 2 and freqs.ndim > 2 and x.shape[2] != 1 and freqs.shape[2] > x.shape[2]:
        return freqs[:, :, : x.shape[2]]
    return freqs


def _normed(rope):
    def rms_rope1(x, freqs, scale, epsilon=1e-6, rot_dim=0):
        normed = functional.rms_norm(x, (x.shape[-1],), scale, epsilon)
        if rot_dim and rot_dim != x.shape[-1]:
            return torch.cat((rope(normed[..., :rot_dim], freqs), normed[..., rot_dim:]), -1)
        return rope(normed, freqs)

    return rms_rope1


def _both(rope):
    return lambda q, k, freqs: (rope(q, freqs), rope(k, freqs))


def _both_normed(rope):
    one = _normed(rope)

    def rms_rope(q, k, freqs, q_scale, k_scale=None, epsilon=1e-6, rot_dim=0):
        return one(q, freqs, q_scale, epsilon, rot_dim), one(
            k, freqs, q_scale if k_scale is None else k_scale, epsilon, rot_dim
        )

    return rms_rope


def _adaln(norm):
    return lambda x, scale, shift, eps=1e-6: norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


OPENED = {
    "apply_rope1": rope1,
    "apply_rope": _both(rope1),
    "apply_rope_split_half1": rope_split_half1,
    "apply_rope_split_half": _both(rope_split_half1),
    "rms_rope1": _normed(rope1),
    "rms_rope": _both_normed(rope1),
    "rms_rope_split_half1": _normed(rope_split_half1),
    "rms_rope_split_half": _both_normed(rope_split_half1),
    "adaln": _adaln(functional.layer_norm),
    "rms_adaln": _adaln(functional.rms_norm),
}


def register() -> None:
    """Tell inductor of those that this host's comfy-kitchen has."""
    for name, function in OPENED.items():
        packet = getattr(torch.ops.comfy_kitchen, name, None)
        if packet is not None:
            REPLACEMENTS[packet.default] = function
