"""Decompose the host's kernels (comfy-kitchen), rotary embeddings and adaptive norms, for inductor to fuse.

The results are those of comfy_kitchen/backends/eager/{rope,adaln}.py; code that works in place there is out of place here.
"""

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional

from ..log import logger
from .backend import REPLACEMENTS


def rope1(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours; `freqs` is `[..., head_dim / 2, 2, 2]`, and may have more tokens than `x`, in dimension 2."""
    pairs = x.to(freqs.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    freqs = _trimmed(x, freqs)
    return (freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def rope_split_half1(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements, one of the first half of the head and one of the second."""
    pairs = x.reshape(*x.shape[:-1], 2, -1).movedim(-2, -1).unsqueeze(-2).to(freqs.dtype)
    rotated = freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]
    return rotated.movedim(-1, -2).reshape(x.shape).type_as(x)


def _trimmed(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    if x.ndim > 2 and freqs.ndim > 2 and x.shape[2] != 1 and freqs.shape[2] > x.shape[2]:
        return freqs[:, :, : x.shape[2]]
    return freqs


def rms_norm(x, _shape, weight=None, eps=1e-6):
    """PyTorch's own decomposition from 2.10 on; in 2.9 C++ code adds `eps` in place, which AOTAutograd refuses here."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).type_as(x)


def _normed(rope):
    def rms_rope1(x, freqs, scale, epsilon=1e-6, rot_dim=0):
        normed = rms_norm(x, (x.shape[-1],), scale, epsilon)
        if rot_dim and rot_dim != x.shape[-1]:
            return torch.cat((rope(normed[..., :rot_dim], freqs), normed[..., rot_dim:]), -1)
        return rope(normed, freqs)

    return rms_rope1


def _both(rope):
    return lambda q, k, freqs: (rope(q, freqs), rope(k, freqs))


def _both_normed(rope):
    one = _normed(rope)

    def rms_rope(q, k, freqs, q_scale, k_scale=None, epsilon=1e-6, rot_dim=0):
        k_scale = q_scale if k_scale is None else k_scale
        return one(q, freqs, q_scale, epsilon, rot_dim), one(k, freqs, k_scale, epsilon, rot_dim)

    return rms_rope


def _adaln(norm):
    return lambda x, scale, shift, eps=1e-6: norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


DECOMPOSITIONS = {
    "apply_rope1": rope1,
    "apply_rope": _both(rope1),
    "apply_rope_split_half1": rope_split_half1,
    "apply_rope_split_half": _both(rope_split_half1),
    "rms_rope1": _normed(rope1),
    "rms_rope": _both_normed(rope1),
    "rms_rope_split_half1": _normed(rope_split_half1),
    "rms_rope_split_half": _both_normed(rope_split_half1),
    "adaln": _adaln(functional.layer_norm),
    "rms_adaln": _adaln(rms_norm),
}


def register() -> None:
    """Register the decompositions of kernels that this host's comfy-kitchen has with the same meaning."""
    for name in _matching():
        REPLACEMENTS[getattr(torch.ops.comfy_kitchen, name).default] = DECOMPOSITIONS[name]


@functools.cache
def _matching() -> list[str]:
    """The kernels that agree with their decomposition on small tensors: those of another version of comfy-kitchen may not."""
    agrees: dict[str, bool] = {}
    for name in (name for name in DECOMPOSITIONS if hasattr(torch.ops.comfy_kitchen, name)):
        usual, *unusual = _cases(name)
        agrees[name] = _agree(name, usual) is True and all(_agree(name, case) is not False for case in unusual)
    others = [name for name, same in agrees.items() if not same]
    if others:
        logger.info("comfy-kitchen's %s differ from this pack's code for them: they are not fused", ", ".join(sorted(others)))
    return [name for name, same in agrees.items() if same]


def _cases(name: str) -> Iterator[tuple]:
    """Arguments of a kernel: the usual ones first."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [random(1, 2, 6, 8) for _ in range(1 if name.endswith(("1", "adaln")) else 2)]
    if name.endswith("adaln"):
        yield from ((*tensors, random(1, 1, 1, 8), random(1, 1, 1, 8), eps) for eps in (1e-6, 0.5))
        return
    scales = [random(8) for _ in tensors] if name.startswith("rms") else []
    for tokens in (6, 9):  # 9: frequencies for more tokens than `x` has
        yield (*tensors, random(1, 1, tokens, 4, 2, 2), *scales)
    if scales:
        yield (*tensors, random(1, 1, 6, 4, 2, 2), *scales, 0.5)
        yield (*tensors, random(1, 1, 6, 2, 2, 2), *scales, 1e-6, 4)  # half of each head is rotated


def _agree(name: str, args: tuple) -> bool | None:
    """Whether the host's kernel and its decomposition agree; None if the kernel does not take these arguments."""
    with torch.no_grad():
        try:
            theirs = getattr(torch.ops.comfy_kitchen, name)(*args)
        except (RuntimeError, TypeError, ValueError) as error:
            logger.debug("comfy-kitchen's %s: %s", name, error)
            return None
        ours = DECOMPOSITIONS[name](*args)
    theirs, ours = ((result,) if isinstance(result, torch.Tensor) else result for result in (theirs, ours))
    if len(theirs) != len(ours):
        return False
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(theirs, ours, strict=True))
