"""Stream weights that ComfyUI's partial loading left in RAM through two buffers on the device.

One block computes from one buffer while the next block's weights arrive in the other. Life cycle of a buffer (`Slot`):

1. `Slots.take`, for a block that fetches. A block that still holds the buffer was skipped, and loses it (`lose_slot`).
2. `copy`: the copy stream waits for the end of the last use (`_free`), copies, and records `_ready`.
3. `wait`, when the block runs: the compute stream waits for `_ready`.
4. `free`, after the block, or when the run was cancelled: the compute stream waits for the copy and records `_free`.
5. `finish`, after the run: the CPU waits until no copy is in flight. The CPU waits nowhere else.

A copy whose block never runs (the run was cancelled, or the block was skipped) still completes. So a buffer is freed only after
the compute stream waits for the copy, and the sources are kept alive until the copy has ended: the host registers its pinned
memory itself (`cudaHostRegister`), so PyTorch does not know that a copy still reads that memory.
"""

import weakref
from typing import NamedTuple

import comfy.ops
import torch
from torch import nn

from .dynamic_vram import parameter

_ALIGNMENT = 256  # compiled kernels assume the alignment that the allocator gives
QUANTIZED = getattr(comfy.ops, "QuantizedTensor", ())
# PyTorch's classes of weights, whose `to` only copies.
KNOWN: set[type] = {torch.Tensor, nn.Parameter}


class Elsewhere(NamedTuple):
    """A parameter of `module`, of which some parameter is on another device or has functions (LoRA) to apply."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        return self.module._parameters[self.name]

    @property
    def functions(self) -> list:
        return self.module.__dict__.get(f"{self.name}_function") or []


def tensors_elsewhere(block: nn.Module, device: torch.device) -> list[Elsewhere]:
    """The parameters of `block` to put in place; `PackedWeights` handles modules with weights of other packs' classes."""
    elsewhere = []
    for module in block.modules():
        if "_v" in module.__dict__:
            continue
        # A tensor on `meta` has no values to copy, and blocks read none.
        tensors = [Elsewhere(module, name) for name, p in module._parameters.items() if p is not None and not p.is_meta]
        if all(is_known(t.tensor) for t in tensors) and any(t.tensor.device != device or t.functions for t in tensors):
            elsewhere += tensors
    return elsewhere


def is_known(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class is PyTorch's or the host's: the `to` of another pack's class may do more than copy."""
    return type(tensor) in KNOWN or isinstance(tensor, QUANTIZED)


class StreamedTensors:
    """The parameters of one block that are copied to `device`.

    Layers that cast their weights compute in `dtype`, and LoRA is applied in `dtype`.
    """

    def __init__(self, tensors: list[Elsewhere], device: torch.device, dtype: torch.dtype):
        self._tensors = tensors
        self._device = device
        self._dtype = dtype
        self._arrived: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by `id` of the source: source and copy
        self._slot: Slot | None = None
        self.bytes = sum(_aligned_bytes(t) for t in self._sources())

    def _sources(self) -> list[torch.Tensor]:
        plain = (t.tensor for t in self._tensors if type(t.tensor) in (torch.Tensor, nn.Parameter))
        return [t for t in plain if t.device != self._device]

    def fetch(self) -> None:
        if self._slot is None and self.bytes and self._device.type == "cuda":
            sources = self._sources()
            if not sources:  # another pack's block swap has moved the block to the device
                self.bytes = 0
                return
            self._slot = _slots_on(self._device).take(self, self.bytes)
            pairs = zip(sources, self._slot.copy(sources), strict=True)
            self._arrived = {id(source): (source, copy) for source, copy in pairs}

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """The parameters per module, on the device, with functions applied."""
        if self._slot is not None:
            self._slot.wait()
        placed: dict[nn.Module, dict] = {}
        for item in self._tensors:
            source = item.tensor
            tensor = source if source.device == self._device else self._arrived.get(id(source), (None, None))[1]
            if tensor is None:
                tensor = source.to(self._device)
            if item.functions:
                tensor = self._apply(tensor, item)
            placed.setdefault(item.module, {})[item.name] = source if tensor is source else parameter(tensor)
        return list(placed.items())

    def _apply(self, tensor: torch.Tensor, item: Elsewhere) -> torch.Tensor:
        """Apply LoRA to a weight as the host does when it casts the weight (comfy/ops.py, `cast_bias_weight`)."""
        casts = getattr(type(item.module), "comfy_cast_weights", False)
        tensor = tensor.to(dtype=self._dtype if casts else tensor.dtype, copy=True)
        if isinstance(tensor, QUANTIZED):
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
        """Called when another block takes the buffer: this block was skipped."""
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
        self._reading: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []
        self.owner: weakref.ref | None = None

    def grow(self, size: int) -> None:
        if size > self._buffer.numel():
            # Both buffers belong to the current stream: it reuses the old memory after the last copy into it, and copies into
            # the new buffer wait for the work that the current stream has queued so far.
            self.wait()
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._free.record(torch.cuda.current_stream(self._device))

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Start copying; returns the destination of each tensor."""
        copies, offset = [], 0
        self._reading = [(event, sources) for event, sources in self._reading if not event.query()]
        self._stream.wait_event(self._free)
        self._ready = torch.cuda.Event()  # a new event for each copy: the previous copy may be in flight
        self._reading.append((self._ready, tensors))
        with torch.cuda.stream(self._stream):
            try:
                for tensor in tensors:
                    copy = self._buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    copy.copy_(tensor, non_blocking=True)
                    copies.append(copy)
                    offset += _aligned_bytes(tensor)
            finally:
                self._ready.record(self._stream)
        return copies

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._ready)

    def free(self) -> None:
        self.wait()  # a copy that was never used may be in flight
        self._free.record(torch.cuda.current_stream(self._device))
        self.owner = None

    def finish(self) -> None:
        """Block the CPU until all copies have ended: the host may unregister and free their sources in RAM next."""
        self.wait()
        for event, _sources in self._reading:
            event.synchronize()
        self._reading.clear()


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

    def finish(self) -> None:
        """Block the CPU until the copies of all slots have ended."""
        for slot in self._slots:
            slot.finish()


_slots: dict[torch.device, Slots] = {}


def _slots_on(device: torch.device) -> Slots:
    if device not in _slots:
        _slots[device] = Slots(device)
    return _slots[device]


def release_buffers() -> None:
    """Free the buffers; called after each sampling run, also after a cancelled run."""
    for slots in list(_slots.values()):
        slots.finish()
    _slots.clear()


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return (tensor.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
