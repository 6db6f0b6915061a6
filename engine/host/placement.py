"""Decide with the host which weights stay on the device when not all can.

Left alone, ComfyUI keeps the largest layers and moves the rest, so that some blocks wait for nearly all of their weights and
others for none. Spread evenly over the blocks, the same traffic hides behind the work of every block.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..binding import plan_for

logger = logging.getLogger("torch-compile-kit")
_ordered: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def order_paged_weights(executor, patcher, *args, **kwargs):
    """A PREPARE_SAMPLING wrapper: lets dynamic VRAM page the weights of all blocks out evenly (model_patcher.py, `load`)."""
    base_model = patcher.model
    done = _ordered.setdefault(base_model, set())
    if not _pages_weights(patcher) or patcher.load_device in done:
        return executor(patcher, *args, **kwargs)
    _forget_pages(base_model, patcher.load_device)
    with _even_load_order(patcher):
        result = executor(patcher, *args, **kwargs)
    done.add(patcher.load_device)
    return result


def _pages_weights(patcher) -> bool:
    return (
        getattr(patcher, "is_dynamic", bool)()
        and isinstance(getattr(patcher.model, "dynamic_vbars", None), dict)
        and hasattr(patcher, "_load_list")
    )


def _forget_pages(base_model, device: torch.device) -> None:
    """Let the host allocate the pages anew; nothing runs now, and weights come from RAM or file again."""
    if base_model.dynamic_vbars.pop(device, None) is None:
        return
    for module in base_model.modules():
        if "_v" in module.__dict__:
            for name in ("_v", "_v_weight", "_v_bias"):
                module.__dict__.pop(name, None)
            module._v_signature = None


@contextmanager
def _even_load_order(patcher) -> Iterator[None]:
    """While it lasts, this patcher lists its layers for dynamic loading in our order."""
    ranks = even_ranks(patcher.model)

    def load_list(self, *args, **kwargs):
        items = type(self)._load_list(self, *args, **kwargs)
        if not (kwargs.get("for_dynamic") or (args and args[0])):
            return items
        # An item is (is large, -size, size, name, module, parameters), sorted by its beginning.
        return [(item[0], ranks.get(item[-3], (0.0, 0)), *item[2:]) for item in items]

    patcher.__dict__["_load_list"] = types.MethodType(load_list, patcher)
    try:
        yield
    finally:
        del patcher.__dict__["_load_list"]


def even_ranks(base_model) -> dict[str, tuple[float, int]]:
    """Layer name -> rank: the layers up to any rank hold about the same share of every block.

    Between layers of one share the blocks come in bit-reversed order, so that neighbours are far apart.
    """
    ranks = {}
    blocks = plan_for(base_model.diffusion_model).blocks
    bits = max(1, (len(blocks) - 1).bit_length())
    for index, block in enumerate(blocks):
        module = base_model.diffusion_model.get_submodule(block.path)
        prefix = ".".join(part for part in ("diffusion_model", block.path) if part)
        turn = int(format(index, f"0{bits}b")[::-1], 2)
        sizes = {name: sum(p.nbytes for p in layer.parameters(recurse=False)) for name, layer in module.named_modules()}
        total, before = max(1, sum(sizes.values())), 0
        for name, size in sizes.items():
            before += size
            ranks[f"{prefix}.{name}" if name else prefix] = (before / total, turn)
    return ranks
