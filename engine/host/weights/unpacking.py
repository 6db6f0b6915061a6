"""Unpack the weights of ComfyUI-GGUF's Linear layers by an operator, outside of the graphs of the blocks.

Traced with the block, the unpacking of every layer is lowered once more for each mixture of packings in a block, and once more
for the first LoRA. With the operator `torch_compile_kit::unpack` a block's graph is that of the plain model:

1. `BlockWeights.place` gives each layer a number, and a `forward_comfy_cast_weights` that asks the operator for the weight.
2. The operator finds the layer by its number, and calls its `get_weight`, which unpacks and applies LoRA, as the pack wrote it.
3. In place of the pack's `dequantize_tensor`, `get_weight` calls code that is compiled once for each packing, as a block is.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...cache.disk import folder_name
from ...compile.compiled_code import BlockCode
from ...compile.traced_graph import current
from ...per_model import PerModel
from ...settings import CompileSettings
from .dynamic_vram import parameter

_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, LayerWeight] = weakref.WeakValueDictionary()
_NUMBER = "torch_compile_kit_number"


@torch.library.custom_op("torch_compile_kit::unpack", mutates_args=())
def unpack(number: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not int(number):  # inductor times kernels on zeros
        return torch.zeros(shape, dtype=dtype, device=device)
    return _by_number[int(number)].unpacked(dtype)


unpack.register_fake(lambda number, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))


def forward_unpacked(self: Any, input: torch.Tensor) -> torch.Tensor:
    """In place of a layer's `forward_comfy_cast_weights`."""
    weight = unpack(getattr(self, _NUMBER), (self.out_features, self.in_features), input.dtype, input.device)
    return nn.functional.linear(input, weight, None if self.bias is None else self.bias.to(input.dtype))


class LayerWeight:
    """The weight of one layer."""

    def __init__(self, layer: Any):
        self.settings = CompileSettings()
        self._layer = weakref.ref(layer)
        get_weight, self._names = type(layer).get_weight, _names_of(layer)
        names = {**get_weight.__globals__, "dequantize_tensor": self._dequantize}
        self._get_weight = types.FunctionType(
            get_weight.__code__, names, get_weight.__name__, get_weight.__defaults__, get_weight.__closure__
        )
        self._get_weight.__kwdefaults__ = get_weight.__kwdefaults__
        number = next(_numbers)
        _by_number[number] = self
        self._number = torch.tensor(number)

    def attributes(self) -> dict[str, object]:
        """Of the layer while its block runs."""
        return {"forward_comfy_cast_weights": types.MethodType(forward_unpacked, self._layer()), _NUMBER: self._number}

    def bias(self) -> nn.Parameter | None:
        """As a plain parameter."""
        layer: Any = self._layer()
        return None if layer.bias is None else parameter(self._get_weight(layer, layer.bias, layer.bias.dtype))

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        layer: Any = self._layer()
        return self._get_weight(layer, layer.weight, dtype)

    def _dequantize(self, tensor: Any, dtype: torch.dtype, inner: Any = None) -> torch.Tensor:
        """In place of the pack's `dequantize_tensor`; `inner` is its `dequant_dtype`."""
        call, kind = current.call, tensor.tensor_type
        if call is None or kind not in self._names["dequantize_functions"]:
            return self._names["dequantize_tensor"](tensor, dtype, inner)
        inner = dtype if inner == "target" else inner
        packing, code = _code_of(self._names["dequantize"], kind, inner, dtype, self.settings)
        rows = tensor.data.as_subclass(torch.Tensor).view(torch.uint8).view(-1, self._names["gguf"].GGML_QUANT_SIZES[kind][1])
        values = packing(rows) if code.failure is not None else code.call(packing, call, (rows,), {})
        return values.view(*tensor.shape)


weight_of = PerModel(LayerWeight)


class _Packing(nn.Module):
    """Unpacks rows, each of them the bytes of numbers that share a scale."""

    def __init__(self, dequantize: Callable, kind: Any, inner: torch.dtype | None, dtype: torch.dtype):
        super().__init__()
        self.dequantize, self.kind, self.inner, self.dtype = dequantize, kind, inner, dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dequantize(rows, self.kind, (-1,), dtype=self.inner).to(self.dtype)


_codes: list[BlockCode] = []


@functools.cache
def _code_of(dequantize: Callable, kind: Any, inner: Any, dtype: torch.dtype, settings: CompileSettings) -> tuple:
    name = f"unpacking of {getattr(kind, 'name', kind)}"
    code = BlockCode(name, _Packing.forward, settings, (folder_name(name, ((),)), name), set())
    _codes.append(code)
    return _Packing(dequantize, kind, inner, dtype), code


def forget_failures() -> None:
    """Let packings be compiled again that failed, as blocks are at a run: the disk was full, say."""
    for code in _codes:
        code.reset_failure()


def _names_of(layer: Any) -> dict:
    """What the layer's `get_weight` uses, and the pack's `dequantize_tensor`, which it calls."""
    names = getattr(getattr(type(layer), "get_weight", None), "__globals__", {})
    return {**getattr(names.get("dequantize_tensor"), "__globals__", {}), **names}


def has_known_unpacking(layer: Any) -> bool:
    """Whether the layer is a Linear layer of ComfyUI-GGUF whose weight, but not its bias, is packed."""
    names = _names_of(layer)
    if (
        not isinstance(layer, nn.Linear)
        or not isinstance(getattr(type(layer), "get_weight", None), types.FunctionType)
        or not {"dequantize", "dequantize_functions", "dequantize_tensor", "gguf"} <= names.keys()
    ):
        return False
    weight, bias = (getattr(p, "tensor_type", None) in names["dequantize_functions"] for p in (layer.weight, layer.bias))
    return weight and not bias and hasattr(type(layer), "forward_comfy_cast_weights")
