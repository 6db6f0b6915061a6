"""Put the weights of a block in place before its compiled forward, and restore the layers after it.

ComfyUI keeps weights where memory allows: on the device, in RAM, or paged by its dynamic VRAM. Each layer's forward transfers
and casts its weights and applies LoRA (comfy/ops.py, `cast_bias_weight`). Traced, that code breaks the graph at each layer, or
costs a graph per layer. So it runs here, before the block: the compiled block sees plain parameters on the device, whatever the
host's memory mode, and the transfer of the next block's weights overlaps this block's compute.

Life cycle of a `BlockWeights`, in each call of the model:

1. `fetch` starts the transfer: called by the previous block's `place` if this block is its `following`, else by `place`.
2. `place` waits for the transfer on the device, sets plain parameters on all layers, hides the attributes from which the host
   fetches weights (`_SOURCES`), and starts the transfer for `following`.
3. The compiled block runs.
4. `release` restores all attributes, and frees the memory (`drop`).

`ModelWeights` is rebuilt when the host has loaded, unloaded or patched weights (`_load_token`). `forget_weights`, after a
sampling run, removes from the layers the attributes that `_settle` set.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from ...errors import InvalidSetting
from ...failures.describe import is_out_of_memory
from ...settings import CompileSettings
from ..adapter import host
from . import dynamic_vram as paging
from . import partial_load as streaming
from .traceable_layers import EagerLayers, PackedWeights, can_be_traced, is_packed, linears, untraceable

# Attributes from which the host's layers fetch and patch weights; hidden while a compiled block runs.
_SOURCES = ("_v", "_prefetch", "weight_lowvram_function", "bias_lowvram_function")
_DEFAULTS = ("comfy_cast_weights", "weight_function", "bias_function")


@dataclass
class Order:
    """The order in which blocks run: at first the order of the list, then that of the last call."""

    last: BlockWeights | None = None  # the block that was placed last
    prefetched: BlockWeights | None = None  # one block at a time, since there are two buffers

    def begin_block(self, weights: BlockWeights) -> None:
        """Before `weights` are placed: drop the prefetched weights of another block, and note which block follows `last`."""
        if self.prefetched is not None and self.prefetched is not weights:
            self.prefetched.drop()
        self.prefetched = None
        if self.last is not None and self.last is not weights:
            self.last.following = weights
        self.last = weights

    def end_call(self) -> None:
        if self.last is not None and self.prefetched is not None:
            self.last.following = None
        self.last = self.prefetched = None


class BlockWeights:
    """The weights of one block, for a model that computes in `dtype` on `device`."""

    def __init__(self, block: nn.Module, device: torch.device, dtype: torch.dtype, settings: CompileSettings):
        # The host's layers have this attribute; PyTorch's wrapper of a layer that another node compiles does not.
        modules = [*block.modules()]
        layers = [m for m in modules if hasattr(type(m), "comfy_cast_weights")]
        self.settled = _settle(layers)
        paged = [m for m in layers if "_v" in m.__dict__]
        calls = host().pages
        self.paged = bool(paged) and calls is not None
        self._fetched: list[paging.PagedLayers | streaming.StreamedTensors] = []
        if paged and calls is not None:
            self._fetched.append(paging.PagedLayers(paged, device, dtype, calls))
        tensors = streaming.tensors_elsewhere(block, device)
        if tensors:
            self._fetched.append(streaming.StreamedTensors(tensors, device, dtype))
        # Without PageCalls only the host can fetch paged layers: these run uncompiled.
        unknown = [] if calls is not None else paged
        packed = {m for m in modules if is_packed(m)}
        traced = {m for m in packed.difference(unknown) if can_be_traced(m)}
        self._packed = PackedWeights(traced, device, settings)
        apart = packed.difference(traced).union(unknown)
        self.foreign = [m for m in modules if m in apart]
        self._eager = EagerLayers(self.foreign) if self.foreign else None
        placed = {*paged, *(t.module for t in tensors), *packed, *self.foreign}
        self._dtype = dtype
        casting = [(m, _casts(m, m._parameters, dtype)) for m in layers if m not in placed]
        self._recast = [(m, casts) for m, casts in casting if m.comfy_cast_weights != casts]
        # Whether weights are transferred in each call.
        self.moves = bool(self._fetched) or self._packed.move
        # Whether all weights are on the device once the pages of dynamic VRAM are filled.
        self.in_pages = not tensors and self._eager is None and not self._packed.move
        placing = self._recast or self._packed.unpacked or self._packed.plain
        self.needed = self.moves or bool(placing) or self._eager is not None
        self._undo: list[tuple[dict, dict]] = []
        self.following: BlockWeights | None = None
        self.order: Order | None = None

    def fetch(self) -> None:
        """Start the transfer on another stream, unless it has been started."""
        for weights in self._fetched:
            weights.fetch()

    def place(self) -> None:
        """Set plain parameters on all layers, and start the transfer for `following`."""
        if self.order is not None:
            self.order.begin_block(self)
        self.fetch()
        if self._eager is not None:
            self._eager.place()
        for module, parameters in [item for weights in (*self._fetched, self._packed) for item in weights.resolve()]:
            if "comfy_cast_weights" in module.__dict__:
                casts = _casts(module, parameters, self._dtype)
                changes = {"comfy_cast_weights": casts, "weight_function": [], "bias_function": []}
                if hasattr(module, "layout_type") and (module.weight_function or module.bias_function):
                    # With functions (LoRA) the host's forward makes no quantised product; this keeps that without them.
                    changes["comfy_force_cast_weights"] = True
                self._swap(module.__dict__, changes, _SOURCES)
            self._swap(module._parameters, parameters, ())
            if module in self._packed.unpacked:
                self._swap(module.__dict__, self._packed.unpacked[module].attributes(), ())
                self._swap(module._parameters, {"bias": self._packed.unpacked[module].bias()}, ())
        for module, casts in self._recast:
            self._swap(module.__dict__, {"comfy_cast_weights": casts}, ())
        if self.order is not None and self.following is not None:
            self.order.prefetched = self.following
            try:
                self.following.fetch()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.following.drop()  # `following` fetches again in its own `place`

    def release(self) -> None:
        """Undo `place`; the memory is reused once the GPU has finished the block."""
        for target, originals in reversed(self._undo):
            for name, value in originals.items():
                if value is _ABSENT:
                    target.pop(name, None)
                else:
                    target[name] = value
        self._undo.clear()
        if self._eager is not None:
            self._eager.release()
        self.drop()

    def drop(self) -> None:
        """Free the fetched weights, used or not."""
        for weights in self._fetched:
            weights.drop()

    def _swap(self, target: dict, changes: dict, hidden: tuple[str, ...]) -> None:
        originals = {name: target.get(name, _ABSENT) for name in changes}
        originals |= {name: target.pop(name) for name in hidden if name in target}
        target.update(changes)
        self._undo.append((target, originals))


_ABSENT = object()


def _casts(layer: nn.Module, parameters: Mapping[str, torch.Tensor | None], dtype: torch.dtype) -> bool:
    """Whether the layer casts `parameters`, which are on the device, to the dtype of its input: because of its class, because
    casting is forced, or because the host casts and one is not in the model's `dtype`. Under dynamic VRAM the host casts in
    every layer: small weights stay in the dtype of the file, and ModelComputeDtype may have changed the model's."""
    if type(layer).comfy_cast_weights or getattr(layer, "comfy_force_cast_weights", False):
        return True
    plain = [
        p for p in parameters.values() if p is not None and p.is_floating_point() and not isinstance(p, streaming.QUANTIZED)
    ]
    return layer.comfy_cast_weights and any(p.dtype != dtype for p in plain)


def _settle(layers: list[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Copy `_DEFAULTS` from a layer's class to the layer, as guards distinguish the two; returns which were set."""
    missing = [(m, name) for m in layers for name in _DEFAULTS if name not in m.__dict__ and hasattr(type(m), name)]
    for layer, name in missing:
        value = getattr(type(layer), name)
        layer.__dict__[name] = list(value) if isinstance(value, list) else value
    return missing


class ModelWeights:
    """The `BlockWeights` of all blocks of a model.

    Raises:
        InvalidSetting: `block_swap` is `off`, and weights are not where the model computes.
    """

    def __init__(self, token: tuple, loaded: Loaded, settings: CompileSettings, blocks: list[nn.Module]):
        self.token: tuple | None = token
        device, block_swap = loaded.device, settings.block_swap
        of_blocks = [BlockWeights(block, device, loaded.dtype, settings) for block in blocks]
        self._settled = [entry for weights in of_blocks for entry in weights.settled]
        moving = [weights for weights in of_blocks if weights.moves]
        foreign = sorted({type(m).__name__ for weights in of_blocks for m in weights.foreign})
        self.notes: list[str] = []
        self._order = Order()
        used: list[BlockWeights | EagerLayers] = [*of_blocks]
        if moving and block_swap == "off":
            raise InvalidSetting(
                "block_swap", "off", f"the weights of {len(moving)} blocks are not on {device}; set block_swap to auto."
            )
        if block_swap == "uncompiled linears":
            used = [EagerLayers(linears(b)) if w.moves else w for b, w in zip(blocks, of_blocks, strict=True)]
            if moving:
                self.notes.append(f"{len(moving)} blocks: weights move, Linear layers run uncompiled.")
        elif moving:
            self.notes.append(f"{len(moving)} blocks: weights are put in place before the compiled blocks run.")
            if paging.comes_apart(device):
                for weights in moving:
                    weights.order = self._order
                for here, following in pairwise(moving):
                    here.following = following
        if foreign:
            self.notes.append(f"Layers of {', '.join(foreign)} run uncompiled: they unpack weights in their own way.")
        self.of_block = {id(b): weights for b, weights in zip(blocks, used, strict=True) if weights.needed}
        self.paged = any(weights.paged for weights in self.of_block.values())
        # Whether all weights can stay where the blocks use them, so that calls can be captured as CUDA graphs.
        self.may_stay = all(weights.in_pages for weights in self.of_block.values())

    def undo_settling(self) -> None:
        """Remove from the layers the attributes that `_settle` set, unless their values have changed since."""
        for layer, name in self._settled:
            if layer.__dict__.get(name) in ([], getattr(type(layer), name)):
                layer.__dict__.pop(name, None)

    def drop(self) -> None:
        """After a call: free weights that were prefetched and not used."""
        self._order.end_call()
        for weights in self.of_block.values():
            weights.drop()


_weights: weakref.WeakKeyDictionary[nn.Module, ModelWeights] = weakref.WeakKeyDictionary()


class Loaded(NamedTuple):
    """A network that the host has loaded, with the dtype and the device in which it computes."""

    model: nn.Module  # the patcher's
    network: nn.Module  # a submodule of `model`, or `model` itself; its blocks are compiled
    dtype: torch.dtype
    device: torch.device


def weights_of(loaded: Loaded, settings: CompileSettings, blocks: list[nn.Module]) -> ModelWeights:
    """The `ModelWeights` for the weights as the host has loaded them now; cached until that changes."""
    token = (settings, *_load_token(loaded.model, blocks, loaded.device))
    weights = _weights.get(loaded.model)
    if weights is None or weights.token != token:
        weights = _weights[loaded.model] = ModelWeights(token, loaded, settings, blocks)
    return weights


def forget_weights(base_model) -> None:
    """After a sampling run: remove from the layers the attributes that `_settle` set; the next call rebuilds `ModelWeights`."""
    weights = _weights.get(base_model)
    if weights is not None:
        weights.undo_settling()
        weights.token = None


def notes_on(base_model) -> list[str]:
    """Lines of the report about the weights of a model that has run."""
    return _weights[base_model].notes if base_model in _weights else []


def _load_token(base_model, blocks: list[nn.Module], device: torch.device) -> tuple:
    """Changes whenever the host loads, unloads or patches weights (comfy/model_patcher.py, `load`)."""
    names = ("current_weight_patches_uuid", "model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram")
    return device, *(getattr(base_model, name, None) for name in names), tuple(map(id, blocks)), len(untraceable)
