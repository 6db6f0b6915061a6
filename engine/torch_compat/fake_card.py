"""Make tensors on a card that is not there, with shapes but without numbers, for prebuild.py, whose process is no server.

In that process ComfyUI runs as on a server with the card: `stand_in` (stand_in_card.py) answers for the card. All functions
that make tensors end in two operators, which are replaced: a tensor on the card becomes a fake tensor of PyTorch's. Tensors on
the CPU stay real, as samplers read their numbers. A dispatch mode could replace the operators too, but Dynamo traces nothing in
a dispatch mode.
"""

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import attention, private
from .stand_in_card import stand_in

CARD = torch.device("cuda", 0)
_aten = torch.library.Library("aten", "IMPL")  # registrations last as long as this object
_MEMORY = 2**50  # so that ComfyUI moves no weights
_SIXTEEN_BITS = {torch.float16, torch.bfloat16}
# The most channels per head that a kernel supports; on Hopper, cuDNN's kernel supports as many as flash attention.
_FLASH_WIDTH, _CUDNN_WIDTH, _HOPPER = 256, 128, (9, 0)


class _NoNumbers(FakeTensorMode):
    """Numbers of tensors on the card are unknown: reading one gives 1, and comparing two tensors says that they are equal."""

    def dispatch(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return getattr(args[0], "number", torch.ones((), dtype=args[0].dtype)).item()
        if func is torch.ops.aten.equal.default:
            return True
        return super().dispatch(func, types, args, kwargs)


class _Stream:
    """The card's only stream."""

    cuda_stream, device = 0, CARD

    def __init__(self, *_args: Any, **_kwargs: Any): ...

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def begin(card: dict[str, Any]) -> _NoNumbers:
    """Make this process see `card`, without a GPU or driver, until the process ends. Call this before ComfyUI is imported.

    Args:
        card: as `stand_in_card.describe` lists it.
    """
    private.switch("init_gpu_context")[1](lambda *_args: None)
    mode, stream = _NoNumbers(allow_non_fake_inputs=True), _Stream()
    answers: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda *_args: (_MEMORY, _MEMORY),
        "memory_stats": lambda *_args: collections.Counter(),
        "memory_reserved": lambda *_args: 0,
        "is_current_stream_capturing": lambda: False,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda *_args: stream,
        "get_allocator_backend": lambda: "none",
        **dict.fromkeys(("set_device", "empty_cache", "ipc_collect"), stream.nothing),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that one function replaces another
        stand_in([card], functools.partial(_fake, mode))
        for name, answer in answers.items():
            setattr(torch.cuda, name, functools.partial(answer))
        torch.cuda.Stream, torch.nn.Module._apply = _Stream, _apply
        _aten.impl("scaled_dot_product_attention", _attend, "AutogradCUDA", allow_override=True)
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` would copy where no fake tensor sees it
    torch.ops.aten.scaled_dot_product_attention.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_attend)
    torch.zeros(1).to(CARD)  # from now on this thread's device needs no driver
    return mode


def _fake(mode: FakeTensorMode, empty: Callable, size: Any, *strides: Any, dtype=None, memory_format=None, **_kwargs: Any):
    layout = {} if memory_format is None else {"memory_format": memory_format}
    return FakeTensor(mode, empty(size, *strides, dtype=dtype, device="meta", **layout), CARD)


def _apply(self, fn, recurse=True):
    """Replaces `nn.Module._apply`, which swaps the contents of fake parameters and fails while weak references exist."""
    for module in self.children() if recurse else ():
        module._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = torch.nn.Parameter(fn(parameter), parameter.requires_grad)
    self._buffers.update({name: fn(buffer) for name, buffer in self._buffers.items() if buffer is not None})
    return self


def weight(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, number: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor on the CPU that takes no memory; `number` is its only element, if that is known."""
    tensor: Any = FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"))
    if number is not None:
        tensor.number = number
    return tensor


def _attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """Attention by the kernel that PyTorch would choose by asking the card."""
    args, named = (q, k, v, attn_mask, dropout_p, is_causal), {"scale": scale, "enable_gqa": enable_gqa}
    for backend in private.sdpa_backends(with_priority=True) if q.is_cuda else ():
        name = backend.name.lower().removesuffix("_attention")
        if name == "math":
            break
        if can_run(name, q, k, v, attn_mask, enable_gqa):
            return getattr(attention, f"{name}_attention")(*args, **named)
    return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(*args, **named)[0]


def can_run(kernel: str, q, k, v, mask, is_grouped: bool = False) -> bool:
    """Whether PyTorch would run the kernel (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), for calls as models make."""
    width, is_short = q.shape[-1], q.dtype in _SIXTEEN_BITS
    is_alike = len({t.shape[-1] for t in (q, k, v)}) == len({t.dtype for t in (q, k, v)}) == 1
    if q.dim() != 4 or not is_alike or any(t.stride(-1) != 1 for t in (q, k, v)):
        return False
    # A trace guards on this comparison, as on PyTorch's own: without the guard, prompt and image would have a symbol each for
    # their batch, and the code another name.
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    if kernel == "flash":
        return is_short and mask is None and width <= _FLASH_WIDTH
    if kernel == "cudnn":
        most = _FLASH_WIDTH if torch.cuda.get_device_capability() == _HOPPER else _CUDNN_WIDTH
        return is_short and width <= most and width % 8 == 0 and k.shape[-2] != 1
    return kernel == "efficient" and not is_grouped and width % (8 if is_short else 4) == 0
