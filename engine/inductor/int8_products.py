"""Split ComfyUI's INT8 linear layers (comfy-kitchen) into quantising and the product, each a kernel for Hopper.

Kitchen's operator computes the whole layer, with a product made for Ampere. On an H100 it takes 0.28 to 0.71 ms for layers of
Flux with 4,096 tokens, 0.20 to 0.50 here (bf16: 0.31 to 0.79), and rotating and quantising takes half of kitchen's time (26
November 2026). An input that is not rotated is quantised by inductor, in the kernel that computes it. Layers that share an
input (q, k and v) share what is quantised.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ..log import logger
from ..torch_compat import private
from .backend import OPTIONS, REPLACEMENTS

GROUP = 256
# With fewer rows (modulation) kitchen has a kernel of its own.
_LEAST_ROWS = 17
aten = torch.ops.aten
_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}


def _kernels() -> Any:
    from . import int8_kernels  # needs Triton

    return int8_kernels


def _rotated_on_gpu(x):
    return _kernels().rotate(x)


def _product_on_gpu(x, x_scale, weight, weight_scale, bias, dtype):
    return _kernels().product(x, x_scale, weight, weight_scale, bias, dtype)


def rotated_on_cpu(x):
    """What the kernel is compared with."""
    h4 = 1.0 - 2.0 * torch.eye(4).flip(0)
    h16 = torch.kron(h4, h4)
    x = (x.float().unflatten(-1, (-1, GROUP)) @ (torch.kron(h16, h16) / 16)).flatten(-2).to(x.dtype)
    return _quantised(x)


def _product_on_cpu(x, x_scale, weight, weight_scale, bias, dtype):
    sums = (x.double() @ weight.double().t()).float() * (x_scale * weight_scale)
    return (sums if bias is None else sums + bias.float()).to(dtype)


def _fake_rotated(x):
    return torch.empty_like(x, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _fake_product(x, x_scale, weight, weight_scale, bias, dtype):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _define(signature: str, on_gpu: Callable, on_cpu: Callable, fake: Callable) -> None:
    name = signature.partition("(")[0]
    if not hasattr(torch.ops.torch_compile_kit, name):  # the pack may lie in two folders: both are imported
        _library.define(signature)
        _library.impl(name, on_gpu, "CUDA")
        _library.impl(name, on_cpu, "CPU")
        torch.library.register_fake(f"torch_compile_kit::{name}", fake, lib=_library)


# Not by torch.library.custom_op, whose checks take longer at each call than to launch a kernel.
_library = torch.library.Library("torch_compile_kit", "FRAGMENT")
_define("int8_rotated(Tensor x) -> (Tensor, Tensor)", _rotated_on_gpu, rotated_on_cpu, _fake_rotated)
_define(
    "int8_product(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _product_on_gpu,
    _product_on_cpu,
    _fake_product,
)


def _quantised(x):
    largest = x.float().abs().amax(-1, keepdim=True).clamp(max=torch.finfo(x.dtype).max)  # a row with inf stays finite
    scale = (largest / 127).clamp(min=1e-30)
    return (x / scale.to(x.dtype)).round().clamp(-128, 127).to(torch.int8), scale


def _kitchen(name: str) -> Any:
    return getattr(torch.ops.comfy_kitchen, name)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def decomposition(x, weight, *rest, **named):
    """What REPLACEMENTS has for the operator; NotImplemented leaves a layer to it."""
    rows = x.numel() // x.shape[-1]
    is_small = isinstance(rows, int) and rows < _LEAST_ROWS
    if not is_hopper(x.device) or is_small or any(size % 16 for size in weight.shape):
        return NotImplemented
    return int8_linear(x, weight, *rest, **named)


def int8_linear(
    x, weight, weight_scale, bias, output_dtype_code, convrot=False, convrot_groupsize=GROUP, input_act=None, *newer, **named
):
    """As comfy_kitchen/backends/eager/quantization.py; `newer`: of 0.2.40, a norm before and a residual after."""
    if input_act == "gelu_tanh":
        x = functional.gelu(x, approximate="tanh")
    elif input_act == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        x = functional.silu(gate) * up
    elif input_act not in (None, "none"):
        return NotImplemented
    if any(value is not None for value in (*newer, *named.values())):
        return NotImplemented
    shape, x = x.shape, x.reshape(-1, weight.shape[1])
    if not convrot:
        values, scale = _quantised(x)
    elif convrot_groupsize == GROUP:
        values, scale = torch.ops.torch_compile_kit.int8_rotated(x.contiguous())
    else:  # as a weight: the rotation is symmetric
        values, scale = _kitchen("quantize_int8_convrot_weight")(x.contiguous(), convrot_groupsize)
    weight_scale = weight_scale.float().reshape(-1).expand(weight.shape[0]).contiguous()
    dtype = _DTYPES[output_dtype_code]
    result = torch.ops.torch_compile_kit.int8_product(values, scale, weight.contiguous(), weight_scale, bias, dtype)
    return result.reshape(*shape[:-1], weight.shape[0])


def quantise_once(graph: fx.Graph) -> None:
    """Merge the nodes that rotate and quantise the same tensor."""
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.find_nodes(op="call_function", target=torch.ops.torch_compile_kit.int8_rotated.default)):
        tensor = node.args[0]
        while tensor.target in (aten.view.default, aten.reshape.default):  # all are matrices of a layer's channels
            tensor = tensor.args[0]
        other = first.setdefault((tensor, node.meta["val"][0].shape[-1]), node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)


@functools.cache
def _as_pass() -> Any:
    class QuantiseOnce(private.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            quantise_once(graph)

        def uuid(self) -> str:
            return "torch-compile-kit quantise_once 2"

    return QuantiseOnce()


def options_of(graph: fx.Graph) -> dict[str, Any]:
    """Get ready for the INT8 layers of Dynamo's graph, where no step waits, and code comes from disk or not."""
    weights = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    weights = [w for w in weights if getattr(getattr(w, "layout_cls", None), "__name__", "") == "TensorWiseINT8Layout"]
    calls = graph.find_nodes(op="call_function", target=_kitchen("int8_linear").default)
    if not (weights or calls) or not _agrees():
        return {}
    for weight in weights:
        _compile_kernels(weight)
    REPLACEMENTS[_kitchen("int8_linear").default] = decomposition
    return {} if private.CustomGraphPass is None else {"post_grad_custom_pre_pass": _as_pass()}


def _compile_kernels(weight: Any) -> None:
    if is_hopper(weight.device) and not any(size % 16 for size in weight.shape):
        try:
            _compile_once(weight.shape[1], weight.dtype)
        except Exception as error:  # the layer itself will say the same, or work
            logger.debug("kernels for INT8 layers: %s", error)


@functools.cache
def _compile_once(channels: int, dtype: torch.dtype) -> None:
    _kernels().compile_for(channels, dtype)


def register() -> None:
    """Look at the graphs of blocks from now on, if this host has the operator."""
    if hasattr(torch.ops.comfy_kitchen, "int8_linear") and options_of not in OPTIONS:
        OPTIONS.append(options_of)


@functools.cache
def _agrees() -> bool:
    """Whether the layer gives the same as our code on a small tensor: another version's may not."""
    x, weight, bias = (
        torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((24, GROUP), (32, GROUP), (32,))
    )
    try:
        if torch.cuda.is_available():
            _kernels()
        for quantised in (
            (*_kitchen("quantize_int8_convrot_weight")(weight, GROUP), bias, 0, True, GROUP),
            (*_kitchen("quantize_int8_rowwise")(weight), None, 0),
        ):
            torch.testing.assert_close(int8_linear(x, *quantised), _kitchen("int8_linear")(x, *quantised))
    except Exception as error:  # an operator that is missing, or has other arguments; no Triton, or an old one
        logger.info("comfy-kitchen's INT8 layers differ from this pack's code for them: they are not fused (%s)", error)
        return False
    return True
