"""Keep some of a model's blocks out of the GPU's memory, as `--blocks_to_swap` of musubi-tuner does.

The host's partial loading keeps what fits; here it is told that less does. Which layers stay is decided as ever
(`host/weights/placement.py`), and what is not there is put in place block by block (`host/weights/blocks.py`).
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import comfy.model_management
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...compile.binding import plan_for
from ...user_input import check_model, check_whole

KEY = "torch-compile-kit.swap"
MOST_BLOCKS = 1000


class Swap(NamedTuple):
    """What was asked of a patcher.

    Args:
        patcher: a clone of the given one, or that one where the host pages weights.
        blocks: how many the model has.
        swapped: of so many the weights are kept out of the GPU's memory; all, where more were asked for.
        size: bytes that are kept out of the GPU's memory; None where the host pages weights, which does better.
    """

    patcher: Any
    blocks: int
    swapped: int
    size: int | None


def swap_blocks(patcher: Any, blocks_to_swap: int) -> Swap:
    """A clone that keeps as many bytes out of the GPU's memory as `blocks_to_swap` average blocks have.

    Raises:
        InvalidSetting: it is no diffusion model, or the number is none.
    """
    check_model(patcher)
    check_whole("blocks_to_swap", blocks_to_swap, 0, MOST_BLOCKS)
    network = patcher.model.diffusion_model
    blocks = [network.get_submodule(block.path) for block in plan_for(network).blocks]
    swapped = min(blocks_to_swap, len(blocks))
    if getattr(patcher, "is_dynamic", bool)():
        return Swap(patcher, len(blocks), swapped, None if swapped else 0)
    clone = patcher.clone()
    clone.__dict__.pop("load", None)  # of a node before
    clone.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    if not swapped:
        return Swap(clone, len(blocks), 0, 0)
    size = sum(map(comfy.model_management.module_size, blocks)) * swapped // len(blocks)
    _limit(patcher.model_size() - size, clone)
    clone.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, functools.partial(_limit_clone, patcher.model_size() - size))
    return Swap(clone, len(blocks), swapped, size)


def _limit_clone(kept: int, _patcher: Any, clone: Any) -> None:
    _limit(kept, clone)


def _limit(kept: int, patcher: Any) -> None:
    patcher.__dict__["load"] = functools.partial(_load_less, weakref.ref(patcher), kept)
    patcher.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)
    patcher.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, functools.partial(_unload_rest, kept))


def _load_less(
    reference: weakref.ref,
    kept: int,
    device_to=None,
    lowvram_model_memory=0,
    force_patch_weights=False,
    full_load=False,
    **more,
) -> object:
    """The host's `load` (comfy/model_patcher.py) with at most so many bytes."""
    patcher: Any = reference()  # alive: this is called as its method
    room = kept if full_load else min(kept, lowvram_model_memory)
    return type(patcher).load(patcher, device_to, room, force_patch_weights, False, **more)


def _unload_rest(kept: int, executor: Any, patcher: Any, *args: Any, **kwargs: Any) -> object:
    """A PREPARE_SAMPLING wrapper: another patcher of the same model may have loaded all of it."""
    result = executor(patcher, *args, **kwargs)
    too_much = patcher.model.model_loaded_weight_memory - kept
    if too_much > 0:
        patcher.partially_unload(patcher.offload_device, too_much)
    return result
