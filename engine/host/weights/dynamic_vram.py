"""Weights under ComfyUI's dynamic VRAM: faulted in, or copied through its cast buffers, block by block.

Everything goes through the host's own functions (comfy/ops.py, comfy/model_prefetch.py), so that memory stays its to manage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.ops
import torch
from torch import nn

from ...torch_settings import SharedScope
from ..adapter import PageCalls, host

try:
    from comfy_aimdo import model_vbar
except ImportError:
    model_vbar = None

PAGE = 32 * 2**20  # VBAR_PAGE_SIZE


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream as the host makes them (comfy/model_management.py, `get_offload_stream`); None where it makes none."""
    if device.type != "cuda" or not getattr(comfy.model_management, "NUM_STREAMS", 0):
        return None
    stream = torch.cuda.Stream(device)
    stream.as_context = torch.cuda.stream
    return stream


class _Streams:
    """Two streams of our own a device, in turn: one for the block that runs, one for the block after it.

    What has no page comes through a buffer that belongs to its stream, and the host's two are everybody's: whatever it brings
    meanwhile, for a layer between blocks or for another model, would be written over what is waiting there.
    """

    def __init__(self) -> None:
        self._pairs: dict[torch.device, list] = {}
        self._taken = threading.local()
        self._scope = SharedScope({"stream": (lambda: comfy.model_management.get_offload_stream, _write)})

    def of(self, device: torch.device) -> list:
        """The two, that to be used next in front; nothing where there are none."""
        if device not in self._pairs:
            pair = [new_stream(device), new_stream(device)]
            self._pairs[device] = [] if None in pair else pair
        return self._pairs[device]

    @contextmanager
    def next(self, device: torch.device) -> Iterator[None]:
        """While it lasts, what this thread asks the host to bring comes on ours."""
        pair = self.of(device)
        if not pair:
            yield
            return
        pair.reverse()
        stream = pair[0]
        stream.wait_stream(comfy.model_management.current_stream(device))  # the buffer's last user is queued there
        self._taken.stream = stream
        try:
            with self._scope.wrapping(stream=self._of_this_thread):
                yield
        finally:
            self._taken.stream = None

    def _of_this_thread(self, hosts: Callable) -> Callable:
        return lambda device: getattr(self._taken, "stream", None) or hosts(device)


def _write(function: Callable) -> None:
    comfy.model_management.get_offload_stream = function


_streams = _Streams()


def comes_apart(device: torch.device) -> bool:
    """Whether what is fetched ahead waits where nobody else writes: on streams of ours, or in memory of its own."""
    return bool(_streams.of(device)) or comfy.model_management.get_offload_stream(device) is None


class PagedLayers:
    """The layers of one block whose weights are paged.

    Args:
        layers: modules with the host's `_v`, `weight` and `bias`.
        device: where to.
        dtype: what layers compute in that cast their weights.
        calls: the host's functions for it.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype, calls: PageCalls):
        self._layers = layers
        self._calls = calls
        self._device = device
        self._dtype = dtype
        self._stream = None
        self._fetched = False

    def fetch(self) -> None:
        """Fault the pages in, and start the copies of what has no page, on a stream of our own."""
        if not self._fetched:
            self._fetched = True
            with _streams.next(self._device):
                self._stream = self._calls.cast(self._layers, None, self._device, None, True)

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """Wait (on the device) for the copies and return the weights per layer, LoRA and casts applied."""
        comfy.model_management.sync_stream(self._device, self._stream)
        placed = []
        for layer in self._layers:
            weight, bias = self._calls.resolve(layer, *_cast_of(layer, self._device, self._dtype))
            placed.append((layer, {"weight": parameter(weight), "bias": parameter(bias)}))
        return placed

    def drop(self) -> None:
        """Unpin the pages; the copies' buffer is free again when the work queued so far is done."""
        if self._fetched:
            self._fetched = False
            try:
                if self._stream is not None:
                    self._stream.wait_stream(comfy.model_management.current_stream(self._device))
            finally:
                self._calls.clean_up(self._layers)


class AllPages:
    """The pages of a model's layers: whether every weight is in them, and keeping it there for the time of a call.

    A page keeps its address for as long as the model lives, whatever is in it (comfy-aimdo, src/model-vbar.c), so that CUDA
    graphs stay valid while weights come and go. Layers that the model does not use have nothing in their pages, and neither has
    a layer for which there was no room; the two are told apart by the line (`watermark`) above which there are no pages.
    """

    def __init__(self, network: nn.Module):
        self._used: set[nn.Module] = set()
        self._whole: tuple | None = None
        self._signature: object = None
        self.new_run(network)

    def __bool__(self) -> bool:
        return host().pages is not None and bool(self._layers)

    def new_run(self, network: nn.Module) -> None:
        """The host may want other weights in the pages (a LoRA): look at each layer again."""
        self._layers = [m for m in network.modules() if "_v" in m.__dict__]
        self._end = max((m._v[1] + m._v[2] for m in self._layers), default=0)
        self._used &= set(self._layers)
        self._whole = None

    def have_room(self) -> bool:
        """Whether all layers may have pages; once the line has fallen it stays down until the host loads the model again."""
        vbar = self._layers[0]._v[0]
        if not hasattr(vbar, "get_watermark") or any(layer._v[0] is not vbar for layer in self._layers):
            return False
        return self._end - vbar.base_addr <= vbar.get_watermark() * PAGE

    def learn(self, anew: bool = False) -> None:
        """After a call that fetched what it needed: which layers it uses; all of them only if there was room.

        Args:
            anew: forget layers that nothing has fetched since the run began.
        """
        if self.have_room():
            fetched = {m for m in self._layers if m._v_signature is not None}
            self._used = fetched if anew else self._used | fetched

    def pin(self) -> tuple | None:
        """What to give to `unpin`, all used pages being kept until then; None if a layer's weights would have to be fetched."""
        if not self.have_room():
            return None
        if self._whole is None:
            if not self._used or not all(map(_is_resident, self._used)):
                return None
            whole = _range_of(self._used)
            self._signature = model_vbar.vbar_fault(whole)
            if self._signature is not None:
                self._whole = whole
            return self._whole
        found = model_vbar.vbar_fault(self._whole)
        if found is not None and model_vbar.vbar_signature_compare(found, self._signature):
            return self._whole
        if found is not None:
            model_vbar.vbar_unpin(self._whole)
        self._whole = None
        return None

    def unpin(self, pinned: tuple) -> None:
        model_vbar.vbar_unpin(pinned)

    def clean_up(self) -> None:
        """After a call that has failed halfway: the host leaves a layer that it was fetching as it is, pin and all."""
        calls = host().pages
        if calls is not None:
            calls.clean_up(self._layers)


def _is_resident(layer: nn.Module) -> bool:
    signature = model_vbar.vbar_fault(layer._v)
    if signature is None:
        return False
    model_vbar.vbar_unpin(layer._v)
    return model_vbar.vbar_signature_compare(signature, layer._v_signature)


def _range_of(layers: set[nn.Module]) -> tuple:
    """One allocation that covers those of all layers."""
    vbar = next(iter(layers))._v[0]
    start = min(layer._v[1] for layer in layers)
    return vbar, start, max(layer._v[1] + layer._v[2] for layer in layers) - start


def address_of(layer: nn.Module) -> object:
    """Where a paged layer's weights are whenever they are in memory."""
    return layer.__dict__["_v"][1:] if "_v" in layer.__dict__ else None


def _cast_of(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple:
    """What the layer's forward asks of the host's cast (comfy/ops.py): dtype of the weight, device, dtype of the bias, dtype in
    which LoRA are added, and whether the sum is rounded to the weight's format again, as a product in that format needs it.

    Args:
        dtype: of the layer's input.
    """
    stored, unchanged = _stored_dtype(layer), not layer.weight_function and not layer.bias_function
    if isinstance(layer.weight, comfy.ops.QuantizedTensor):
        product = hasattr(layer, "forward_comfy_cast_weights") and not getattr(layer, "_full_precision_mm", True)
        forced = getattr(layer, "comfy_force_cast_weights", False)
        return stored, device, stored, dtype, product and unchanged and not forced
    if isinstance(layer, comfy.ops.fp8_ops.Linear) and stored is torch.float8_e4m3fn and unchanged:
        return stored, device, dtype, comfy.model_management.lora_compute_dtype(device), True
    cast_to = dtype if type(layer).comfy_cast_weights else stored
    return cast_to, device, cast_to, dtype, False


def _stored_dtype(layer: nn.Module) -> torch.dtype:
    return getattr(layer, "weight_comfy_model_dtype", None) or layer.weight.dtype


def parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """Guards tell tensors and parameters apart; blocks that are at home on the device have parameters."""
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
