"""Weights under ComfyUI's dynamic VRAM: faulted in, or copied through its cast buffers, block by block.

Everything goes through the host's own functions (comfy/ops.py, comfy/model_prefetch.py), so that memory stays its to manage.
"""

from __future__ import annotations

import comfy.model_management
import comfy.ops
import torch
from torch import nn

try:
    from comfy_aimdo import model_vbar
except ImportError:
    model_vbar = None

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


class AllPages:
    """The pages of a model's layers: whether every weight is in them, and keeping it there for the time of a call.

    A page keeps its address for as long as the model lives, whatever is in it (comfy-aimdo, src/model-vbar.c), so that CUDA
    graphs stay valid while weights come and go. Layers that the model does not use have nothing in their pages; which ones it
    uses is seen after a call has fetched them.
    """

    def __init__(self, network: nn.Module):
        self._layers = [m for m in network.modules() if "_v" in m.__dict__]
        self._used: list[nn.Module] = []
        self._range: tuple | None = None
        self._signature: object = None

    def __bool__(self) -> bool:
        return bool(self._layers)

    def new_run(self, network: nn.Module) -> None:
        """The host may want other weights in the pages (a LoRA): look at each layer again."""
        self._layers = [m for m in network.modules() if "_v" in m.__dict__]
        self._used = [m for m in self._used if "_v" in m.__dict__]
        self._range = None

    def learn(self) -> None:
        """Call it when the model has run without a graph."""
        known = set(self._used)
        self._used += [m for m in self._layers if m._v_signature is not None and m not in known]

    def pin(self) -> bool:
        """Keep all pages until `unpin`; False, and nothing is kept, if a layer's weights would have to be fetched."""
        if self._range is not None:
            found = model_vbar.vbar_fault(self._range)
            if found is not None and model_vbar.vbar_signature_compare(found, self._signature):
                return True
            if found is not None:
                model_vbar.vbar_unpin(self._range)
            self._range = None
        whole = _range_of(self._used) if all(map(_is_resident, self._used)) else None
        self._signature = model_vbar.vbar_fault(whole) if whole is not None else None
        if self._signature is None:
            return False
        self._range = whole
        return True

    def unpin(self) -> None:
        model_vbar.vbar_unpin(self._range)


def _is_resident(layer: nn.Module) -> bool:
    signature = model_vbar.vbar_fault(layer._v)
    if signature is None:
        return False
    model_vbar.vbar_unpin(layer._v)
    return model_vbar.vbar_signature_compare(signature, layer._v_signature)


def _range_of(layers: list[nn.Module]) -> tuple | None:
    """One allocation that covers those of all layers; None if there is none."""
    vbars = {id(layer._v[0]) for layer in layers}
    if len(vbars) != 1:
        return None
    start = min(layer._v[1] for layer in layers)
    return layers[0]._v[0], start, max(layer._v[1] + layer._v[2] for layer in layers) - start


def address_of(layer: nn.Module) -> object:
    """Where a paged layer's weights are whenever they are in memory."""
    return layer.__dict__["_v"][1:] if "_v" in layer.__dict__ else None


def _stored_dtype(layer: nn.Module) -> torch.dtype:
    return getattr(layer, "weight_comfy_model_dtype", None) or layer.weight.dtype


def parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """Guards tell tensors and parameters apart; blocks that are at home on the device have parameters."""
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
