"""Keep some of a model's blocks out of the GPU's memory, as `--blocks_to_swap` of musubi-tuner does.

The host's partial loading loads as many layers as fit; `LimitedLoad` lowers that limit. `host/weights/blocks.py` fetches the
other layers, block by block.
"""

import functools
from typing import Any, NamedTuple

import comfy.model_management
from comfy.patcher_extension import WrappersMP

from ...compile.binding import modules_at, plan_for
from ...user_input import check_model, check_whole
from .placement import override_methods

KEY = "torch-compile-kit.swap"
MOST_BLOCKS = 1000


class Swap(NamedTuple):
    """The result of `swap_blocks`."""

    patcher: Any  # a clone; under dynamic VRAM the patcher itself
    blocks: int  # number of blocks of the model
    swapped: int  # number of these that are swapped, at most all
    size: int | None  # bytes kept out of the GPU's memory; None under dynamic VRAM, which does better


def swap_blocks(patcher: Any, blocks_to_swap: int) -> Swap:
    """A clone that keeps as many bytes out of the GPU's memory as `blocks_to_swap` average blocks have.

    Raises:
        InvalidSetting: `patcher` is no diffusion model, or `blocks_to_swap` is out of range.
    """
    check_model(patcher)
    check_whole("blocks_to_swap", blocks_to_swap, 0, MOST_BLOCKS)
    network = patcher.model.diffusion_model
    blocks = list(modules_at(network, plan_for(network)))
    swapped = min(blocks_to_swap, len(blocks))
    if patcher.is_dynamic():
        return Swap(patcher, len(blocks), swapped, None if swapped else 0)
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)  # set by an earlier node
    if not swapped:
        return Swap(clone, len(blocks), 0, 0)
    size = sum(map(comfy.model_management.module_size, blocks)) * swapped // len(blocks)
    wrapper = functools.partial(_unload_rest, patcher.model_size() - size)
    clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, wrapper)
    override_methods(clone, LimitedLoad)
    return Swap(clone, len(blocks), swapped, size)


class LimitedLoad:
    """Override `load` of a `ModelPatcher` to load at most the bytes that the patcher's `_unload_rest` wrapper allows."""

    get_wrappers: Any

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False, **more) -> object:
        """Call the host's `load` (comfy/model_patcher.py) with at most `kept` bytes."""
        for wrapper in self.get_wrappers(WrappersMP.PREPARE_SAMPLING, KEY):
            (kept,) = wrapper.args
            lowvram_model_memory, full_load = kept if full_load else min(kept, lowvram_model_memory), False
        # By name, as the host does: the `load` of GGUF's patchers takes one of the two by name only.
        more |= {"lowvram_model_memory": lowvram_model_memory, "force_patch_weights": force_patch_weights}
        return super().load(device_to, full_load=full_load, **more)  # type: ignore[misc]


def _unload_rest(kept: int, executor: Any, patcher: Any, *args: Any, **kwargs: Any) -> object:
    """A PREPARE_SAMPLING wrapper: unload all but `kept` bytes, as another patcher may have loaded the whole model."""
    override_methods(patcher, LimitedLoad)  # a clone can be of another class: GGUF
    result = executor(patcher, *args, **kwargs)
    too_much = patcher.model.model_loaded_weight_memory - kept
    if too_much > 0:
        patcher.partially_unload(patcher.offload_device, too_much)
    return result
