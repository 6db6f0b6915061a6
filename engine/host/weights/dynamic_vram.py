"""Fetch weights under ComfyUI's dynamic VRAM, block by block: fault them into their pages, or copy them to a cast buffer.

Only the host's functions (comfy/ops.py, comfy/model_prefetch.py) move weights, so that the host keeps managing memory.
Life cycle of the weights of one block (`PagedLayers`):

1. `fetch`: the host faults the pages in and pins them; weights without a page are copied on a stream of `_Streams`.
2. `resolve`: the compute stream waits for the copies; the host applies LoRA and casts.
3. `drop`: pages are unpinned; the copy stream waits for the block's work before its buffer is overwritten.

Life cycle of a whole model's pages, for CUDA graphs (`AllPages`):

1. `learn`, after a call that fetched weights: note which layers the model uses.
2. `pin`, before a capture or a replay: fault in the pages of all these layers; None if a weight would have to be fetched.
3. `unpin`, after the capture or replay; `clean_up` after a call that failed halfway.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.ops
import torch
from comfy_aimdo import model_vbar
from torch import nn

from ...log import logger
from ...torch_settings import SharedScope, attribute
from ..adapter import PageCalls, host

PAGE = 32 * 2**20  # VBAR_PAGE_SIZE


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream like the host's (comfy/model_management.py, `get_offload_stream`); None if the host uses none."""
    if device.type != "cuda" or not getattr(comfy.model_management, "NUM_STREAMS", 0):
        return None
    stream = torch.cuda.Stream(device)
    stream.as_context = torch.cuda.stream
    return stream


class _Streams:
    """Two streams of this pack per device, used in turn: one for the block that runs, one for the block after it.

    Weights without a page are copied into a buffer that belongs to the stream. The host's own two streams cannot be used: the
    host also copies layers between blocks, and of other models, to their buffers, and would overwrite prefetched weights.
    """

    def __init__(self) -> None:
        self._pairs: dict[torch.device, list] = {}
        self._taken = threading.local()
        self._scope = SharedScope({"stream": attribute(comfy.model_management, "get_offload_stream")})

    def of(self, device: torch.device) -> list:
        """The pair of a device, last used first; empty if the host uses no streams."""
        if device not in self._pairs:
            pair = [new_stream(device), new_stream(device)]
            self._pairs[device] = [] if None in pair else pair
        return self._pairs[device]

    @contextmanager
    def next(self, device: torch.device) -> Iterator[Any]:
        """A context in which the host copies weights for this thread on the pair's next stream; yields that stream."""
        pair = self.of(device)
        if not pair:
            yield None
            return
        pair.reverse()
        stream = pair[0]
        stream.wait_stream(comfy.model_management.current_stream(device))  # which has queued the buffer's last use
        self._taken.stream = stream
        try:
            # Other threads keep the host's streams.
            with self._scope.wrapping(stream=lambda hosts: lambda on: getattr(self._taken, "stream", None) or hosts(on)):
                yield stream
        finally:
            self._taken.stream = None


_streams = _Streams()


def comes_apart(device: torch.device) -> bool:
    """Whether prefetched weights are safe from overwriting: in a buffer of `_Streams`, or in newly allocated memory."""
    return bool(_streams.of(device)) or comfy.model_management.get_offload_stream(device) is None


class PagedLayers:
    """The layers of one block whose weights are paged: modules with the host's `_v`, `weight` and `bias`.

    Layers that cast their weights compute in `dtype`.
    """

    def __init__(self, layers: list[nn.Module], device: torch.device, dtype: torch.dtype, calls: PageCalls):
        self._layers = layers
        self._calls = calls
        self._device = device
        self._dtype = dtype
        self._stream = None
        self._fetched = False

    def fetch(self) -> None:
        if not self._fetched:
            self._fetched = True
            try:
                with _streams.next(self._device) as self._stream:
                    self._stream = self._calls.cast(self._layers, None, self._device, None, True)
            except BaseException:
                self.drop()
                raise

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """Make the compute stream wait for the copies; return the weights per layer, after LoRA and casts."""
        comfy.model_management.sync_stream(self._device, self._stream)
        placed = []
        for layer in self._layers:
            try:
                weight, bias = self._calls.resolve(layer, *_cast_of(layer, self._device, self._dtype))
            except BaseException:
                layer._v_signature = None  # the host marks the page as filled before it adds the LoRA
                raise
            placed.append((layer, {"weight": parameter(weight), "bias": parameter(bias)}))
        return placed

    def drop(self) -> None:
        if self._fetched:
            self._fetched = False
            try:
                # Copies that no stream has waited for may be in flight, into pages that the host fills next.
                comfy.model_management.sync_stream(self._device, self._stream)
                if self._stream is not None:
                    self._stream.wait_stream(comfy.model_management.current_stream(self._device))
            finally:
                self._calls.clean_up(self._layers)


class AllPages:
    """Tell whether all weights that a model uses are in their pages, and pin them for the length of a call.

    A page keeps its address while the model lives, filled or not (comfy-aimdo, src/model-vbar.c), so CUDA graphs stay valid
    while weights are evicted and fetched. A layer's pages are empty if the model does not use it, or if memory was short. The
    watermark distinguishes the two: above the watermark there are no pages.
    """

    def __init__(self, network: nn.Module):
        self._used: set[nn.Module] = set()
        self._whole: tuple | None = None
        self._signature: object = None
        self.new_run(network)

    def __bool__(self) -> bool:
        return host().pages is not None and bool(self._layers)

    def new_run(self, network: nn.Module) -> None:
        """Call when the pages may have to hold other weights (a LoRA): `pin` then checks each layer again."""
        self._layers = [m for m in network.modules() if "_v" in m.__dict__]
        self._end = max((m._v[1] + m._v[2] for m in self._layers), default=0)
        self._used &= set(self._layers)
        self._whole = None

    def have_room(self) -> bool:
        """Whether all layers are below the watermark; once lowered, it stays down until the host loads the model again."""
        vbar = self._layers[0]._v[0]
        if not hasattr(vbar, "get_watermark") or any(layer._v[0] is not vbar for layer in self._layers):
            return False
        return self._end - vbar.base_addr <= vbar.get_watermark() * PAGE

    def learn(self, anew: bool = False) -> None:
        """After a call that fetched its weights: note which layers the call used, if all have room.

        `anew` forgets layers that no call has fetched since the run began.
        """
        if self.have_room():
            fetched = {m for m in self._layers if m._v_signature is not None}
            self._used = fetched if anew else self._used | fetched

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which other allocations evict none of the pages. Pins alone do not suffice: dynamic VRAM does not stop
        at pinned pages, and frees all when they are unpinned (comfy-aimdo, src/model-vbar.c, `vbars_free`, `vbar_unpin`)."""
        vbar = self._layers[0]._v[0]
        set_limit = getattr(vbar, "set_watermark_limit", lambda _size: None)
        set_limit(self._end - vbar.base_addr)
        try:
            yield
        finally:
            set_limit(0)

    def pin(self) -> tuple | None:
        """Pin all used pages and return the argument for `unpin`; None if weights are missing.

        Layers are checked one by one until all weights are in memory. After that only the signature of the pages is compared,
        so call `new_run` whenever the pages may have to hold other weights.
        """
        if not self.have_room():
            return None
        if self._whole is None:
            if not self._used or not all(map(_is_resident, self._used)):
                return None
            # One allocation that spans the allocations of all layers.
            vbar, start = next(iter(self._used))._v[0], min(layer._v[1] for layer in self._used)
            whole = vbar, start, max(layer._v[1] + layer._v[2] for layer in self._used) - start
            self._signature = _fault(whole)
            if self._signature is not None:
                self._whole = whole
            return self._whole
        signature = _fault(self._whole)
        if signature is not None:
            if model_vbar.vbar_signature_compare(signature, self._signature):
                return self._whole
            model_vbar.vbar_unpin(self._whole)
        self._whole = None
        return None

    def unpin(self, pinned: tuple) -> None:
        model_vbar.vbar_unpin(pinned)

    def clean_up(self) -> None:
        """After a call that failed halfway: unpin the layer that the host was fetching, which the host leaves pinned."""
        calls = host().pages
        if calls is not None:
            calls.clean_up(self._layers)


def _fault(allocation: tuple) -> object:
    """Pin pages, allocating memory for those that have none; returns their signature, or None if memory is short."""
    try:
        return model_vbar.vbar_fault(allocation)
    except RuntimeError as error:  # the driver refused: the model runs without a graph
        logger.debug("no memory for pages: %s", error)
        return None


def _is_resident(layer: nn.Module) -> bool:
    signature = _fault(layer._v)
    if signature is None:
        return False
    model_vbar.vbar_unpin(layer._v)
    return model_vbar.vbar_signature_compare(signature, layer._v_signature)


def address_of(layer: nn.Module) -> object:
    """The address and size of a layer's pages, which stay the same; None for a layer that is not paged."""
    return layer.__dict__["_v"][1:] if "_v" in layer.__dict__ else None


def _cast_of(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple:
    """The arguments that the layer's forward passes to the host's cast (comfy/ops.py) for an input in `dtype`: weight dtype,
    device, bias dtype, dtype in which LoRA is added, and whether the sum is requantised for a product in the weight's format.
    """
    stored = getattr(layer, "weight_comfy_model_dtype", None) or layer.weight.dtype
    unchanged = not layer.weight_function and not layer.bias_function
    if isinstance(layer.weight, comfy.ops.QuantizedTensor):
        product = hasattr(layer, "forward_comfy_cast_weights") and not getattr(layer, "_full_precision_mm", True)
        forced = getattr(layer, "comfy_force_cast_weights", False)
        return stored, device, stored, dtype, product and unchanged and not forced
    # The host checks the same: with a bf16 file under dynamic VRAM only the page is in fp8; the product is in bf16.
    if isinstance(layer, comfy.ops.fp8_ops.Linear) and layer.weight.dtype is torch.float8_e4m3fn and unchanged:
        return stored, device, dtype, comfy.model_management.lora_compute_dtype(device), True
    cast_to = dtype if type(layer).comfy_cast_weights else stored
    return cast_to, device, cast_to, dtype, False


def parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    """Wrap the tensor in a Parameter: guards distinguish the two, and blocks with all weights on the device have parameters."""
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
