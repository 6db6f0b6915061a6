"""Weights that ComfyUI's partial loading left in RAM: streamed through two buffers on the device.

One block computes from one buffer while the next block's weights arrive in the other. Events order the two streams; the CPU
waits for nothing. Each use of a buffer waits for the end of its last use, so any number of blocks and steps may share the two.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import comfy.model_management
import comfy.ops
import torch
from torch import nn

from .paging import parameter

_ALIGNMENT = 256  # compiled kernels assume the alignment that the allocator gives


@dataclass(frozen=True)
class Elsewhere:
    """A parameter that is not ready to be used where it is: on another device, or with functions (LoRA) to apply.

    Args:
        module: its owner.
        name: in the owner's `_parameters`.
    """

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        return self.module._parameters[self.name]

    @property
    def functions(self) -> list:
        return self.module.__dict__.get(f"{self.name}_function") or []


def tensors_elsewhere(block: nn.Module, device: torch.device) -> list[Elsewhere]:
    """The parameters of `block` that must be put in place."""
    found = []
    for module in block.modules():
        if "_v" in module.__dict__:
            continue
        tensors = [Elsewhere(module, name) for name, p in module._parameters.items() if p is not None]
        if any(t.tensor.device != device or t.functions for t in tensors):
            found += tensors
    return found


class StreamedTensors:
    """The parameters of one block that travel.

    Args:
        tensors: what to place, see `tensors_elsewhere`.
        device: where to.
        dtype: what layers compute in that cast their weights, and LoRA is applied in.
    """

    def __init__(self, tensors: list[Elsewhere], device: torch.device, dtype: torch.dtype):
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._arrived: dict[int, torch.Tensor] = {}
        self._slot: Slot | None = None
        self.bytes = sum(_room(t.tensor) for t in tensors if t.tensor.device != device)

    def fetch(self) -> None:
        if self._slot is None and self.bytes and self._device.type == "cuda":
            self._slot = _slots_on(self._device).take(self, self.bytes)
            moving = [t.tensor for t in self._tensors if t.tensor.device != self._device]
            self._arrived = dict(zip(map(id, moving), self._slot.copy(moving), strict=True))

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """The parameters per module, on the device, functions applied."""
        if self._slot is not None:
            self._slot.wait()
        placed: dict[nn.Module, dict] = {}
        for item in self._tensors:
            source = item.tensor
            tensor = self._arrived.get(id(source))
            if tensor is None:
                tensor = source.to(self._device)
            if item.functions:
                tensor = self._apply(tensor, item)
            placed.setdefault(item.module, {})[item.name] = source if tensor is source else parameter(tensor)
        return list(placed.items())

    def _apply(self, tensor: torch.Tensor, item: Elsewhere) -> torch.Tensor:
        """As the host does on the way (comfy/ops.py, `cast_bias_weight`)."""
        casts = getattr(type(item.module), "comfy_cast_weights", False)
        tensor = tensor.to(dtype=self._dtype if casts else tensor.dtype, copy=True)
        if isinstance(tensor, comfy.ops.QuantizedTensor):
            tensor = tensor.dequantize()
        for function in item.functions:
            tensor = function(tensor)
        return tensor

    def drop(self) -> None:
        self._arrived = {}
        if self._slot is not None:
            self._slot.free()
            self._slot = None

    def lose_slot(self) -> None:
        """Another block needs the buffer before this one ran (its turn was skipped)."""
        self._arrived = {}
        self._slot = None


class Slot:
    """A buffer on the device that holds the weights of one block at a time."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self._device = device
        self._stream = stream
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._ready = torch.cuda.Event()
        self._free = torch.cuda.Event()
        self.owner: weakref.ref | None = None
        self.size = 0

    def grow(self, size: int) -> None:
        if size > self.size:
            # The old buffer's last readers are queued on the current stream, where its memory is reused in order.
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self.size = size
            self._free.record(torch.cuda.current_stream(self._device))

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start copying; returns where each tensor will be."""
        copies, offset = [], 0
        self._stream.wait_event(self._free)
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                copy = _view_at(self._buffer, offset, tensor)
                copy.copy_(tensor, non_blocking=True)
                copies.append(copy)
                offset += _room(tensor)
            self._ready.record(self._stream)
        return copies

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ready)

    def free(self) -> None:
        self._free.record(torch.cuda.current_stream(self._device))
        self.owner = None


class Slots:
    """Two buffers, used in turn."""

    def __init__(self, device: torch.device):
        stream = torch.cuda.Stream(device)
        self._slots = [Slot(device, stream), Slot(device, stream)]
        self._next = 0

    def take(self, owner: StreamedTensors, size: int) -> Slot:
        slot = self._slots[self._next]
        self._next = 1 - self._next
        previous = slot.owner() if slot.owner is not None else None
        if previous is not None:
            previous.lose_slot()
        slot.grow(size)
        slot.owner = weakref.ref(owner)
        return slot


_slots: dict[torch.device, Slots] = {}


def _slots_on(device: torch.device) -> Slots:
    if device not in _slots:
        _slots[device] = Slots(device)
    return _slots[device]


def release_buffers() -> None:
    """Give the buffers' memory back; called when a model has finished sampling."""
    _slots.clear()


def _room(tensor: torch.Tensor) -> int:
    return (tensor.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def _view_at(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
