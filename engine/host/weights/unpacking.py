"""Unpack the weights of ComfyUI-GGUF's Linear layers by a custom op, outside of the graphs of the blocks.

Traced with the block, the unpacking of every layer would be compiled again for each mixture of packings in a block, and again
for the first LoRA. With the custom op `torch_compile_kit::unpack` a block has the same graph as in the unpacked model:

1. `BlockWeights.place` gives each layer a number, and a `forward_comfy_cast_weights` that gets the weight from the op.
2. The op finds the layer by its number, and calls the pack's own `get_weight`, which unpacks and applies LoRA.
3. In place of the pack's `dequantize_tensor`, `get_weight` calls code that is compiled once for each packing, as a block is.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...compile.compiled_code import BlockCode
from ...compile.session import monitor
from ...failures.describe import never_swallowed
from ...log import logger
from ...per_model import PerModel
from ...settings import CompileSettings
from .dynamic_vram import parameter

_numbers = itertools.count(1)
_weights: weakref.WeakValueDictionary[int, LayerWeight] = weakref.WeakValueDictionary()  # by number
_NUMBER = "torch_compile_kit_number"


@torch.library.custom_op("torch_compile_kit::unpack", mutates_args=())
def unpack(number: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not int(number):  # a warm-up on zeros
        return torch.zeros(shape, dtype=dtype, device=device)
    return _weights[int(number)].unpacked(dtype)


unpack.register_fake(lambda number, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))


def forward_unpacked(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Replaces a layer's `forward_comfy_cast_weights`."""
    weight = unpack(getattr(self, _NUMBER), (self.out_features, self.in_features), input.dtype, input.device)
    return nn.functional.linear(input, weight, None if self.bias is None else self.bias.to(input.dtype))


class LayerWeight:
    """Unpacks the weight of one layer."""

    def __init__(self, layer: Any):
        self.settings = CompileSettings()
        self._layer = weakref.ref(layer)
        get_weight, self._whole = type(layer).get_weight, _dequantize_tensor_of(layer)
        names = {**get_weight.__globals__, "dequantize_tensor": self._dequantize}
        self._get_weight = types.FunctionType(
            get_weight.__code__, names, get_weight.__name__, get_weight.__defaults__, get_weight.__closure__
        )
        self._get_weight.__kwdefaults__ = get_weight.__kwdefaults__
        number = next(_numbers)
        _weights[number] = self
        self._number = torch.tensor(number)

    def attributes(self) -> dict[str, object]:
        """The attributes that the layer gets while its block runs."""
        return {"forward_comfy_cast_weights": types.MethodType(forward_unpacked, self._layer()), _NUMBER: self._number}

    def bias(self) -> nn.Parameter | None:
        """The layer's bias as a plain parameter; None if the layer has none."""
        layer: Any = self._layer()
        return None if layer.bias is None else parameter(self._get_weight(layer, layer.bias, layer.bias.dtype))

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        layer: Any = self._layer()
        return self._get_weight(layer, layer.weight, dtype)

    def _dequantize(self, tensor: Any, dtype: torch.dtype, inner: Any = None) -> torch.Tensor:
        """Replaces the pack's `dequantize_tensor`; `inner` is its `dequant_dtype`."""
        call, kind, whole = monitor.calls[-1].call if monitor.calls else None, tensor.tensor_type, self._whole
        is_known = inner in (None, "target") or isinstance(inner, torch.dtype)  # a development branch passes settings there
        if call is None or not is_known or kind not in whole.__globals__["dequantize_functions"]:
            return whole(tensor, dtype, inner)
        packing, code = _code_of(whole, kind, dtype if inner == "target" else inner, dtype, self.settings)
        if packing.agrees is None:
            packing.compare(tensor, whole(tensor, dtype, inner))
        if not packing.agrees:
            return whole(tensor, dtype, inner)
        call.packings.add(code)
        code.raise_if_stopped()
        rows = packing.rows(tensor)
        values = packing(rows) if code.failure is not None else code.call(packing, call, (rows,), {})
        return values.view(*tensor.shape)


weight_of = PerModel(LayerWeight)


class _Packing(nn.Module):
    """Unpacks rows; a row is the bytes of the numbers that share a scale.

    Attributes:
        agrees: whether the result equals the pack's `dequantize_tensor`, which in a fork may do more; None: not compared yet.
    """

    def __init__(self, names: dict[str, Any], kind: Any, inner: torch.dtype | None, dtype: torch.dtype):
        super().__init__()
        self.dequantize, self.kind, self.inner, self.dtype = names["dequantize"], kind, inner, dtype
        self.row_bytes = names["gguf"].GGML_QUANT_SIZES[kind][1]
        self.agrees: bool | None = None

    def rows(self, tensor: Any) -> torch.Tensor:
        return tensor.data.as_subclass(torch.Tensor).view(torch.uint8).view(-1, self.row_bytes)

    def compare(self, tensor: Any, expected: torch.Tensor) -> None:
        try:
            values = self(self.rows(tensor)).view(*tensor.shape)
            self.agrees = values.shape == expected.shape and torch.allclose(values, expected, 0, 0, equal_nan=True)
        except Exception as error:
            if never_swallowed(error):
                raise
            self.agrees = False
        if not self.agrees:
            logger.warning("weights packed as %s are unpacked uncompiled: the pack does so in a way of its own", self.kind)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dequantize(rows, self.kind, (-1,), dtype=self.inner).to(self.dtype)


@functools.cache
def _code_of(whole: Any, kind: Any, inner: torch.dtype | None, dtype: torch.dtype, settings: CompileSettings) -> tuple:
    """A `_Packing` that unpacks as the pack's `dequantize_tensor` (`whole`) does, and its code."""
    name = f"unpacking of {getattr(kind, 'name', kind)}"
    code = BlockCode(name, _Packing.forward, settings)
    return _Packing(whole.__globals__, kind, inner, dtype), code


def _class_of_pack(layer: Any) -> type | None:
    """The class of a layer, or a base of it, whose `get_weight` calls the pack's `dequantize_tensor`."""
    names = ((base, getattr(vars(base).get("get_weight"), "__globals__", {})) for base in type(layer).__mro__)
    return next((base for base, found in names if "dequantize_tensor" in found), None)


def _dequantize_tensor_of(layer: Any) -> Any:
    """The pack's `dequantize_tensor`, which the layer's `get_weight` calls; None for other layers."""
    base: Any = _class_of_pack(layer)
    return None if base is None else base.get_weight.__globals__["dequantize_tensor"]


def has_known_unpacking(layer: Any) -> bool:
    """Whether the layer is a Linear layer of ComfyUI-GGUF whose weight, but not its bias, is packed."""
    names = getattr(_dequantize_tensor_of(layer), "__globals__", {})
    if (
        not isinstance(layer, nn.Linear)
        or not isinstance(getattr(type(layer), "get_weight", None), types.FunctionType)
        or not {"dequantize", "dequantize_functions", "gguf"} <= names.keys()
    ):
        return False
    weight, bias = (getattr(p, "tensor_type", None) in names["dequantize_functions"] for p in (layer.weight, layer.bias))
    forward = getattr(type(layer), "forward_comfy_cast_weights", None)  # a fork's forward may do more
    return weight and not bias and getattr(forward, "__module__", None) == getattr(_class_of_pack(layer), "__module__", "")
