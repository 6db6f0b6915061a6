"""Decide with the host which weights stay on the device when not all can.

Left alone, ComfyUI keeps the largest layers and moves the rest, so that some blocks wait for nearly all of their weights and
others for none. With as many bytes to move for every block, the same traffic hides behind the work of every block, and the
buffers that it needs are the smallest.
"""

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

from ...compile.binding import modules_at, plan_for
from ...per_model import PerModel
from ..adapter import host, is_dynamic

KEY = "torch-compile-kit.placement"  # tags a model that is loaded in our order, see `_tag_load_order`
# Models whose pages were allocated in our order, by device.
_paged: PerModel[set[torch.device]] = PerModel(lambda _model: set())


def spread_weights(executor, model, *args, **kwargs):
    """A PREPARE_SAMPLING wrapper (comfy/sampler_helpers.py): a model too large to load whole is loaded evenly over blocks."""
    override_methods(model, EvenLoad)  # a clone can be of another class: GGUF, `clone(disable_dynamic=True)`
    if not host().list_of_layers:
        return executor(model, *args, **kwargs)
    base_model, device = model.model, model.load_device
    if is_dynamic(model) and device not in _paged(base_model):
        # Pages are allocated once; afterwards the host only moves the line between kept and paged.
        _forget_pages(base_model, device)
        _paged(base_model).add(device)
    with nullcontext() if is_dynamic(model) or device.type == "cpu" else _buffers_announced(model):
        return executor(model, *args, **kwargs)


def override_methods(patcher: Any, methods: type) -> None:
    """Give the patcher a class that inherits from `methods` and from its class, in this order.

    Functions in the patcher's `__dict__` would do less: `copy.copy` copies them to another patcher, still bound to this one.
    """
    kind: Any = type(patcher)
    if not issubclass(kind, methods):
        patcher.__class__ = _overridden(kind, methods)


@functools.cache
def _overridden(kind: Any, methods: type) -> type:
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__})


class EvenLoad:
    """Override methods of a `ModelPatcher` to load and unload evenly, while `spread_weights` is among its wrappers."""

    model: Any

    def partially_load(self, *args, **kwargs) -> int:
        """Called also in the middle of a run: for a ControlNet whose hint goes through a VAE."""
        load = functools.partial(super().partially_load, *args, **kwargs)  # type: ignore[misc]
        if is_dynamic(self) or not _is_spread(self):
            return load()
        _load_anew_after_others(self.model)
        try:
            return load()
        finally:
            _tag_load_order(self.model)

    def partially_unload(self, *args, **kwargs) -> int:
        """Tag also what stays of a model that was loaded whole, which has no tag."""
        freed = super().partially_unload(*args, **kwargs)  # type: ignore[misc]
        if not is_dynamic(self) and _is_spread(self):
            _tag_load_order(self.model)
        return freed

    def _load_list(self, *args, **kwargs) -> list:
        """The host's list (comfy/model_patcher.py) in our order."""
        items = super()._load_list(*args, **kwargs)  # type: ignore[misc]
        if not _is_spread(self):
            return items
        if args[0] if args else kwargs.get("for_dynamic"):
            return _even_by_rank(_ranks(self.model), items)
        return _even_by_size(_ranks(self.model), items)


def _is_spread(patcher: Any) -> bool:
    return host().list_of_layers and spread_weights in patcher.get_all_wrappers(WrappersMP.PREPARE_SAMPLING)


def _tag_load_order(base_model) -> None:
    """Note that the loaded part is in our order, where the host notes the LoRA in the loaded part.

    Another order on top would leave both parts on the device. For a patcher without `EvenLoad` the tag is another set of LoRA,
    so that the host loads anew (`partially_load`); `EvenLoad` takes the tag away first. The tag holds the size of the loaded
    part: such a patcher may also unload some of that part, and the tag stays.
    """
    current = getattr(base_model, "current_weight_patches_uuid", None)
    if isinstance(current, tuple):
        current = current[1]
    if current is not None and base_model.model_lowvram:
        base_model.current_weight_patches_uuid = (KEY, current, base_model.model_loaded_weight_memory)


def _load_anew_after_others(base_model) -> None:
    current = getattr(base_model, "current_weight_patches_uuid", None)
    if isinstance(current, tuple) and current[2] == base_model.model_loaded_weight_memory:
        base_model.current_weight_patches_uuid = current[1]
    elif current is not None and base_model.model_lowvram:
        base_model.current_weight_patches_uuid = (KEY, None, None)


def even_ranks(base_model) -> dict[str, tuple[int, int]]:
    """Layer name -> rank: without the layers up to any rank, every block has about as many bytes left to move.

    Between layers of one rank the blocks come in bit-reversed order, so that neighbours are far apart.
    """
    ranks, network = {}, base_model.diffusion_model
    names = {module: ".".join(filter(None, ("diffusion_model", name))) for name, module in network.named_modules()}
    blocks = list(modules_at(network, plan_for(network)))  # not by path: a patch may have removed blocks
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
    """Order a list for dynamic VRAM: items are (is large, -size, size, name, module, parameters), the first items are kept."""
    if not all(len(i) >= 5 and isinstance(i[-3], str) for i in items):  # another host's
        return items
    return [(i[0], ranks.get(i[-3], _FIRST), *i[2:]) for i in items]


class _RankedSize(int):
    """A size in bytes that sorts by rank: the host sorts by size, then adds up sizes."""

    rank: tuple

    def __lt__(self, other: Any) -> bool:
        return self.rank < other.rank

    def __gt__(self, other: Any) -> bool:
        return self.rank > other.rank

    def __eq__(self, other: object) -> bool:
        return self.rank == getattr(other, "rank", None)

    __hash__ = int.__hash__


def _even_by_size(ranks: dict, items: list) -> list:
    """Order a list for partial loading: items are (size when moving, size, name, module, parameters), the last are kept."""
    if not all(len(i) >= 3 and isinstance(i[0], int) and isinstance(i[2], str) for i in items):  # another host's
        return items
    ordered = []
    for size, *rest in items:
        ranked = _RankedSize(size)
        left, turn = ranks.get(rest[1], _FIRST)
        ranked.rank = (-left, -turn)
        ordered.append((ranked, *rest))
    return ordered


def _forget_pages(base_model, device: torch.device) -> None:
    """Let the host allocate the pages anew: no model runs now, and weights come from RAM or file again."""
    if base_model.dynamic_vbars.pop(device, None) is None:
        return
    for module in base_model.modules():
        if "_v" in module.__dict__:
            module._v_signature = None
        for name in ("_v", "_v_weight", "_v_bias", "_v_block", "_comfy_graph"):
            module.__dict__.pop(name, None)


@contextmanager
def _buffers_announced(patcher) -> Iterator[None]:
    """A context in which the host counts the two buffers of `Slots` as memory that sampling needs, if not all weights fit."""
    base_model, network = patcher.model, patcher.model.diffusion_model
    free_bytes = comfy.model_management.get_free_memory(patcher.load_device) + patcher.loaded_size()
    free_bytes -= comfy.model_management.minimum_inference_memory()
    share_in_ram = min(1.0, max(0.0, 1 - free_bytes / max(1, patcher.model_size())))
    largest = max(map(comfy.model_management.module_size, modules_at(network, plan_for(network))), default=0)
    attributes, ours = base_model.__dict__, _MemoryRequired(base_model, 2 * share_in_ram * largest)
    attributes["memory_required"] = ours
    try:
        yield
    finally:
        ours.extra = 0
        if attributes.get("memory_required") is ours:  # else the host has loaded a patch of another pack meanwhile
            del attributes["memory_required"]
            if ours.original is not None:
                attributes["memory_required"] = ours.original


class _MemoryRequired:
    """In place of the method of the model's instance. With no `extra` it is that method, wherever the host keeps it."""

    def __init__(self, base_model: Any, extra: float):
        self.extra, self._model = extra, weakref.ref(base_model)
        self.original = base_model.__dict__.get("memory_required")
        while isinstance(self.original, _MemoryRequired):
            self.original = self.original.original

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        model: Any = self._model()
        original = self.original or functools.partial(type(model).memory_required, model)
        return original(*args, **kwargs) + self.extra
