"""Spread offloaded weights evenly over the blocks under dynamic VRAM, and reserve memory for the buffers of partial loading.

ComfyUI keeps the largest layers on the device and streams the rest, so that some blocks wait for nearly all of their weights
and others for none. If every block has equally many bytes to stream, the same traffic overlaps with the compute of all blocks.
Under partial loading the host's order stays: with another order, the layers already loaded in the host's order would stay, too.
"""

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from ...compile.binding import modules_at, plan_for
from ...per_model import PerModel
from ..adapter import host

# For each model, the devices on which its pages were allocated in the order of this pack.
_paged: PerModel[set[torch.device]] = PerModel(lambda _model: set())


def spread_weights(executor, model, *args, **kwargs):
    """A PREPARE_SAMPLING wrapper (comfy/sampler_helpers.py): pages are allocated evenly over the blocks."""
    override_methods(model, EvenLoad)  # a clone can be of another class: GGUF, `clone(disable_dynamic=True)`
    if not host().list_of_layers:
        return executor(model, *args, **kwargs)
    base_model, device = model.model, model.load_device
    if model.is_dynamic() and device not in _paged(base_model) and model.loaded_size() < model.model_size():
        # Pages are allocated once, in one order; afterwards the host only moves the watermark. While all weights are loaded, as
        # when a prompt without this pack has loaded them, the order does not matter.
        _forget_pages(base_model, device)
        _paged(base_model).add(device)
    with nullcontext() if model.is_dynamic() or device.type == "cpu" else _buffers_announced(model):
        return executor(model, *args, **kwargs)


def override_methods(patcher: Any, methods: type) -> None:
    """Give the patcher a class that inherits from `methods` and from its class, in this order.

    Methods in the patcher's `__dict__` would not do: `copy.copy` copies them to another patcher, still bound to this one.
    """
    kind: Any = type(patcher)
    if not issubclass(kind, methods):
        patcher.__class__ = overridden(kind, methods)


@functools.cache
def overridden(kind: Any, methods: type) -> type:
    """A class that inherits from `methods` and from `kind`, with the name of `kind`."""
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class EvenLoad:
    """Override a method of a `ModelPatcher` to load evenly under dynamic VRAM, while `spread_weights` is among its wrappers."""

    def _load_list(self, *args, **kwargs) -> list:
        """The host's list (comfy/model_patcher.py), with sort keys that spread it over the blocks."""
        items, patcher = super()._load_list(*args, **kwargs), cast(Any, self)  # type: ignore[misc]
        is_for_dynamic = args[0] if args else kwargs.get("for_dynamic")
        is_spread = host().list_of_layers and spread_weights in patcher.get_all_wrappers(WrappersMP.PREPARE_SAMPLING)
        return _even_by_rank(_ranks(patcher.model), items) if is_for_dynamic and is_spread else items


def even_ranks(base_model) -> dict[str, tuple[int, int]]:
    """Layer name -> rank: if all layers up to any rank stay on the device, every block has about equally many bytes to stream.

    Layers with equally many bytes left are in bit-reversed order of their blocks, so that neighbours are far apart.
    """
    ranks, network = {}, base_model.diffusion_model
    names = {module: ".".join(filter(None, ("diffusion_model", name))) for name, module in network.named_modules()}
    blocks = list(modules_at(network, plan_for(network)))  # named by module, not by path: a patch may have removed blocks
    bits = max(1, (len(blocks) - 1).bit_length())
    for index, module in enumerate(blocks):
        prefix = names[module]
        turn = int(format(index, f"0{bits}b")[::-1], 2)
        sizes = {name: sum(p.nbytes for p in layer.parameters(recurse=False)) for name, layer in module.named_modules()}
        left = sum(sizes.values())
        for name, size in sizes.items():
            ranks[f"{prefix}.{name}" if name else prefix] = (-left, turn)
            left -= size
    return ranks


_ranks = PerModel(even_ranks)
_FIRST = (-math.inf, 0)  # layers outside the blocks stay on the device before all others


def _even_by_rank(ranks: dict, items: list) -> list:
    """Replace `-size` by the rank in the list for dynamic VRAM, which the host then sorts: the first layers stay on the device.
    An item is (is large, -size, size, name, module, parameters)."""
    if not all(len(i) >= 5 and isinstance(i[-3], str) for i in items):  # another version of ComfyUI has other items
        return items
    return [(i[0], ranks.get(i[-3], _FIRST), *i[2:]) for i in items]


def _forget_pages(base_model, device: torch.device) -> None:
    """Make the host allocate the pages again. Safe, as no model runs now, and weights are loaded again from RAM or file."""
    if base_model.dynamic_vbars.pop(device, None) is None:
        return
    for module in base_model.modules():
        if "_v" in module.__dict__:
            module._v_signature = None
        for name in ("_v", "_v_weight", "_v_bias", "_v_block", "_comfy_graph"):
            module.__dict__.pop(name, None)


@contextmanager
def _buffers_announced(patcher) -> Iterator[None]:
    """A context in which the host counts the two buffers of `Slots` as memory that sampling needs, unless all weights fit.

    Each buffer has the size of the largest block, as the host may leave all of that block in RAM.
    """
    base_model, network = patcher.model, patcher.model.diffusion_model
    free_bytes = comfy.model_management.get_free_memory(patcher.load_device) + patcher.loaded_size()
    free_bytes -= comfy.model_management.minimum_inference_memory()
    largest = max(map(comfy.model_management.module_size, modules_at(network, plan_for(network))), default=0)
    buffers = 2 * largest if free_bytes < patcher.model_size() else 0
    attributes, ours = base_model.__dict__, _MemoryRequired(base_model, buffers)
    attributes["memory_required"] = ours
    try:
        yield
    finally:
        ours.extra = 0
        if attributes.get("memory_required") is ours:  # else the host has set an object patch of another pack
            del attributes["memory_required"]
            if ours.original is not None:
                attributes["memory_required"] = ours.original


class _MemoryRequired:
    """Replace a model's `memory_required`: adds `extra` bytes. With 0, a reference that the host keeps acts as the method."""

    def __init__(self, base_model: Any, extra: float):
        self.extra, self._model = extra, weakref.ref(base_model)
        self.original = base_model.__dict__.get("memory_required")
        while isinstance(self.original, _MemoryRequired):
            self.original = self.original.original

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        model: Any = self._model()
        original = self.original or functools.partial(type(model).memory_required, model)
        return original(*args, **kwargs) + self.extra
