"""Keep LoRA of packed weights on the GPU, for CUDA graphs.

ComfyUI-GGUF applies a LoRA whenever a weight is unpacked. The weight has an attribute `patches`, a list in the format of the
host's `calculate_weight` (comfy/lora.py), whose tensors are in RAM: each step copies them to the GPU, which cannot be captured.
So the tensors are copied once, when a graph may be captured, and the weight gets its original list back when graphs are dropped
(`ModelGraphs.release`). The copies are freed when the host removes the LoRA, since the weight then gets another list.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import comfy.lora
import comfy.weight_adapter
import torch
from torch import nn

from ...failures.describe import is_out_of_memory
from ...ownership import pack_of

# Adapters of comfy/weight_adapter that can be captured. The others read values from the GPU, which fails in a capture; the host
# only logs that error, so the graph would lack the LoRA.
_ADAPTERS = frozenset({"lora", "loha", "lokr", "glora"})


class _Copies(list):
    """Patches with their tensors on a weight's device; `kept_in_ram`: the original list."""

    kept_in_ram: list

    def copy(self) -> _Copies:
        """`GGMLTensor.to` gives its result a copy of `patches`, also where the result is the tensor itself."""
        again = _Copies(self)
        again.kept_in_ram = self.kept_in_ram
        return again


def keep_on_device(network: nn.Module, device: torch.device, make_room: Callable[[int], bool]) -> str | None:
    """Copy LoRA of packed weights to the device. `make_room`: frees so many bytes in addition to those that a call needs, and
    returns whether that succeeded; called if anything is to be copied.

    Returns:
        Why a CUDA graph cannot apply the LoRA; None: it can, or there is no LoRA.
    """
    carried = [(p, patches) for p, patches in _lists(network) if patches]
    if not carried:
        return None
    if pack_of(comfy.lora.calculate_weight) is not None or not all(_is_hosts(patches) for _, patches in carried):
        return "a LoRA of packed weights runs other code than ComfyUI's usual"
    elsewhere = [(p, patches) for p, patches in carried if _bytes_elsewhere(patches, device)]
    if elsewhere:
        in_each_step = "LoRA are copied to packed weights in each step"
        needed = sum(_bytes_elsewhere(patches, device) for _, patches in elsewhere)
        if any(p.device != device for p in network.parameters()) or not make_room(needed):
            return in_each_step
        try:
            copies = [_Copies(_mapped(patches, lambda tensor: tensor.to(device))) for _, patches in elsewhere]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return in_each_step
        for (p, patches), copied in zip(elsewhere, copies, strict=True):
            p.patches, copied.kept_in_ram = copied, patches
    return None


def release_of(network: nn.Module) -> Callable[[], bool] | None:
    """A function that frees the copies, and returns whether there were any; None: there are none."""
    has_copies = any(isinstance(patches, _Copies) for _, patches in _lists(network))
    return functools.partial(_put_back, weakref.ref(network)) if has_copies else None


def _put_back(reference: weakref.ref[nn.Module]) -> bool:
    network, had_copies = reference(), False
    for p in network.parameters() if network is not None else ():  # at exit, globals of this module are gone: use none
        if hasattr(patches := vars(p).get("patches"), "kept_in_ram"):
            p.patches, had_copies = patches.kept_in_ram, True
    return had_copies


def _lists(network: nn.Module) -> Iterator[tuple[Any, list]]:
    all_patches = ((p, vars(p).get("patches")) for p in network.parameters())
    return ((p, patches) for p, patches in all_patches if isinstance(patches, list))


def _bytes_elsewhere(patches: list, device: torch.device) -> int:
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes if tensor.device != device else 0
        return tensor

    _mapped(patches, add)
    return total


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of `value` with its tensors changed. Adapters are copied, too, as the host's patchers share them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        changed = copy.copy(value)
        changed.weights = _mapped(value.weights, change)
        return changed
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _is_hosts(value: Any) -> bool:
    """Whether a patch consists of data and code of the host alone."""
    if isinstance(value, list | tuple):
        return all(map(_is_hosts, value))
    if isinstance(value, comfy.weight_adapter.WeightAdapterBase):
        return pack_of(type(value)) is None and value.name in _ADAPTERS and _is_hosts(value.weights)
    if callable(value):
        return pack_of(value) is None
    return isinstance(value, torch.Tensor | None | int | float | str | dict)
