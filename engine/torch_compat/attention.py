"""Choose the kernel of each call of attention when a graph is traced.

PyTorch asks the card which kernels can run. In the compile process, which has no card, none could. So in the process that
traces, `kernel_for` notes which operators PyTorch calls for each `scaled_dot_product_attention`, and the call is sent as one of
KERNELS: what PyTorch does after its choice (aten/src/ATen/native/transformers/attention.cpp). The guards of the trace on sizes
hold for the choice too, since PyTorch has made the same choice in the trace.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
FUNCTIONS = {
    torch.nn.functional.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,  # called by packs that replace the function above
    aten.scaled_dot_product_attention.default,
}
# For each kernel, operators that no other kernel calls.
_OPERATORS = {
    "flash_attention": {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"},
    "efficient_attention": {"_scaled_dot_product_efficient_attention"},
    "cudnn_attention": {"_scaled_dot_product_cudnn_attention"},
    "math": {"_softmax", "_safe_softmax"},
}
# What a mask of bools adds to the scores where it is False: for cuDNN's kernel, and for the others.
_MASKED_FOR_CUDNN, _MASKED = -65504.0, float("-inf")
# Flash attention needs heads, and efficient attention rows of a mask, of a width that is a multiple of this.
_ALIGNMENT = 8


class _OfThread(TorchDispatchMode):
    """A mode that affects its own thread only. For any other mode PyTorch sets a process-wide flag: while one thread is in that
    mode, Dynamo traces nothing on any thread (up to 2.10), and if two modes overlap, the flag may stay set."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Noting(_OfThread):
    """Record the operators that PyTorch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.scaled_dot_product_attention.default:  # in inference mode PyTorch has not decomposed the call
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.called.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def kernel_for(node: fx.Node, enabled: Sequence[SDPBackend]) -> str | None:
    """The name in KERNELS of the kernel that PyTorch chooses for a call in Dynamo's graph; None for any other kernel.

    Args:
        enabled: the kernels that may run, the preferred first.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["example_value"])
    chosen = torch.nn.attention.sdpa_kernel(list(enabled), set_priority=True)
    mode = next(value.fake_mode for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    with chosen, mode, _Noting() as noting:
        torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    return next((kernel for kernel, operators in _OPERATORS.items() if operators & noting.called), None)


class WithoutPlans(_OfThread):
    """A mode in which cuDNN's attention returns zeros, except in a device's first call, which loads cuDNN. For each shape cuDNN
    compiles a plan, in a quarter of a second or more, which no other thread can use (aten/src/ATen/native/cudnn/MHA.cpp)."""

    _loaded: ClassVar[set[torch.device]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not aten._scaled_dot_product_cudnn_attention.default:
            return func(*args, **(kwargs or {}))
        device = args[0].device
        if device not in self._loaded:
            result = func(*args, **(kwargs or {}))
            self._loaded.add(device)
            return result
        there, here = (functools.partial(tree_map_only, torch.Tensor, functools.partial(_zeros, d)) for d in ("meta", device))
        return here(func(*there(args), **there(kwargs or {})))


def _zeros(device: torch.device | str, like: torch.Tensor) -> torch.Tensor:
    """Zeros with the strides of `like`: inductor asserts those of the result."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()


def _additive(mask: torch.Tensor | None, masked: float, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), masked, dtype=dtype, device=mask.device))


def _autocast(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Cast as autocast casts arguments of `scaled_dot_product_attention`; it does not cast those of the kernels."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if is_cast else tensor


def _padded(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    missing = -size % _ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _as_called(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give `kernel` the signature of `scaled_dot_product_attention`."""

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        query, key, value, attn_mask = map(_autocast, (query, key, value, attn_mask))
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    attend.__name__ = attend.__qualname__ = kernel.__name__  # PyTorch pickles it by name
    return attend


@_as_called
def flash_attention(q, k, v, mask, dropout, causal, scale, _gqa):
    if q.device.type == "cpu":
        mask = _additive(mask, _MASKED, q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0]
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    q, k, v = (_padded(tensor, width) for tensor in (q, k, v))
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0][..., :width]


@_as_called
def efficient_attention(q, k, v, mask, dropout, causal, scale, _gqa):
    mask = _additive(mask, _MASKED, q.dtype)
    if mask is not None:
        keys = mask.shape[-1]
        mask = _padded(mask, keys)[..., :keys].expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, dropout, causal, scale=scale)[0]


@_as_called
def cudnn_attention(q, k, v, mask, dropout, causal, scale, _gqa):
    mask = _additive(mask, _MASKED_FOR_CUDNN, q.dtype)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, dropout, causal, False, scale=scale)[0]


@_as_called
def math(q, k, v, mask, dropout, causal, scale, gqa):
    mask = _additive(mask, _MASKED, q.dtype)
    return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, None, scale=scale, enable_gqa=gqa)[0]


KERNELS = {kernel.__name__: kernel for kernel in (flash_attention, efficient_attention, cudnn_attention, math)}
