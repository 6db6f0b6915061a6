"""Weights under ComfyUI's dynamic VRAM: faulted in, or copied through its cast buffers, block by block.

Everything goes through the host's own functions (comfy/ops.py, comfy/model_prefetch.py), so that memory stays its to manage.
"""

from __future__ import annotations

import comfy.model_management
import comfy.ops
import torch
from torch import nn

try:
    from comfy.model_prefetch import cleanup_prefetched_modules
    from comfy.ops import cast_modules_with_vbar, resolve_cast_module_with_vbar
except ImportError:  # hosts without dynamic VRAM, or with another kind of it: layers never have `_v` that we could place
    cast_modules_with_vbar = None

SUPPORTED = cast_modules_with_vbar is not None


class PagedLayers:
    """The layers of one block whose weights are paged.

    Args:
        layers: modules with the host's `_v`, `weight` and `bias`.
        device: where to.
        dtype: what layers compute in that cast their weights.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype):
        self._layers = layers
        self._device = device
        self._dtype = dtype
        self._stream = None
        self._fetched = False

    def fetch(self) -> None:
        """Fault the pages in, and start the copies of what has no page on the host's offload stream."""
        if not self._fetched:
            self._fetched = True
            self._stream = cast_modules_with_vbar(self._layers, None, self._device, None, True)

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """Wait (on the device) for the copies and return the weights per layer, LoRA and casts applied."""
        comfy.model_management.sync_stream(self._device, self._stream)
        placed = []
        for layer in self._layers:
            quantized = isinstance(layer.weight, comfy.ops.QuantizedTensor)
            dtype = self._dtype if type(layer).comfy_cast_weights and not quantized else _stored_dtype(layer)
            weight, bias = resolve_cast_module_with_vbar(layer, dtype, self._device, dtype, self._dtype, quantized)
            placed.append((layer, {"weight": parameter(weight), "bias": parameter(bias)}))
        return placed

    def drop(self) -> None:
        """Unpin the pages; the copies' buffer is free again when the work queued so far is done."""
        if self._fetched:
            self._fetched = False
            if self._stream is not None:
                self._stream.wait_stream(comfy.model_management.current_stream(self._device))
            cleanup_prefetched_modules(self._layers)


def _stored_dtype(layer: nn.Module) -> torch.dtype:
    return getattr(layer, "weight_comfy_model_dtype", None) or layer.weight.dtype


def parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """Guards tell tensors and parameters apart; blocks that are at home on the device have parameters."""
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
