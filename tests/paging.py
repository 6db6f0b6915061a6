"""ComfyUI's dynamic VRAM on a CPU: the host's own code for paged weights, over pages that a test keeps.

Real paging needs a GPU (comfy-aimdo); replaced here are only its five entry points, by functions with their contract.
"""

from __future__ import annotations

import contextlib

import torch


class Pages:
    """The device's memory, a page per layer. `resident` names the layers that get one.

    Args:
        model: the host's BaseModel; layers of more than `minimum` bytes are paged, as comfy/model_patcher.py does.
    """

    def __init__(self, model, minimum: int = 16 * 1024):
        import comfy.memory_management as memory

        self.memory: dict[str, torch.Tensor] = {}
        self._signatures: dict[str, int] = {}  # of what is in memory; an `id` could be that of a page taken away before
        self.resident: set[str] = set()
        self.pinned = 0
        self.limits = [0]  # up to where nobody may take pages, in bytes; the last one holds
        self.faults = 0
        self.layers = {
            name: layer
            for name, layer in model.diffusion_model.named_modules()
            if hasattr(layer, "comfy_cast_weights") and sum(p.nbytes for p in layer.parameters(recurse=False)) > minimum
        }
        for layer in (m for m in model.diffusion_model.modules() if hasattr(m, "comfy_cast_weights")):
            layer.comfy_cast_weights = True
        self.places: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, layer in self.layers.items():
            size = memory.vram_aligned_size([layer.weight, layer.bias])
            layer._v, layer._v_signature = (self, offset, size), None
            layer.weight_lowvram_function = layer.bias_lowvram_function = None
            layer.weight_function, layer.bias_function = [], []
            layer.seed_key, layer._pin_state = name, {}
            self.places[name] = (offset, size)
            offset += size
        self._model = model
        model.lowvram_patch_counter += 1  # the host's loading leaves its marks, this too

    base_addr = 0

    def get_watermark(self) -> int:
        """Up to which page of 32 MiB there is room."""
        end = max(at + size for at, size in self.places.values())
        return -(-end // 2**25) if self.resident == set(self.layers) else 0

    def set_watermark_limit(self, size: int) -> None:
        self.limits.append(size)

    def within(self, allocation) -> list[str]:
        """The layers whose pages are in an allocation, which may be that of one layer or of many."""
        _, start, size = allocation
        return [name for name, (at, _) in self.places.items() if start <= at < start + size]

    def fault(self, allocation):
        names = self.within(allocation)
        self.faults += 1
        for name in names:
            if name not in self.resident:
                self.memory.pop(name, None)
                if self.limits[-1]:
                    raise RuntimeError("Fault failed: 2")
                return None
        for name in names:
            if name not in self.memory:
                self.memory[name] = torch.full((self.places[name][1],), 255, dtype=torch.uint8)
                self._signatures[name] = self.faults
        self.pinned += len(names)
        return [self._signatures[name] for name in names]

    def unpin(self, allocation):
        self.pinned -= len(self.within(allocation))

    def tensor(self, allocation) -> torch.Tensor:
        (name,) = self.within(allocation)
        return self.memory[name]

    def remove(self) -> None:
        self._model.lowvram_patch_counter += 1
        for layer in self.layers.values():
            for name in ("_v", "_v_signature", "_v_weight", "_v_bias", "weight_lowvram_function", "bias_lowvram_function"):
                layer.__dict__.pop(name, None)


class Buffers:
    """The host's two offload streams, each with a buffer for weights that have no page: who gets a stream writes there.

    Streams of ours have buffers of their own, as on a GPU.
    """

    def __init__(self, size: int = 2**24):
        self._streams = [self.Stream(), self.Stream()]
        self._buffers: dict = {}
        self._size = size
        self._next = 0

    class Stream(contextlib.nullcontext):
        def wait_stream(self, _other):
            pass

    def stream(self):
        self._next = 1 - self._next
        return self._streams[self._next]

    def of(self, stream):
        if stream not in self._buffers:
            self._buffers[stream] = torch.zeros(self._size, dtype=torch.uint8)
        self._buffer = self._buffers[stream]
        return self

    def get(self, size, offset):
        return self._buffer[offset : offset + size]


def own_streams(engine, monkeypatch):
    """As on a GPU we have streams of our own; on a CPU there are none."""
    paging = engine("host.weights.dynamic_vram")
    monkeypatch.setattr(paging, "new_stream", lambda _device: Buffers.Stream())
    monkeypatch.setattr(paging._streams, "_pairs", {})


@contextlib.contextmanager
def paged(monkeypatch, model, buffers: Buffers | None = None, **options):
    """While it lasts, the big layers of `model` are paged; yields its `Pages`.

    Args:
        buffers: without them each layer's weights come in memory of their own, if they have no page.
        options: of `Pages`.
    """
    import comfy.model_management
    import comfy_aimdo.model_vbar
    import comfy_aimdo.torch
    from comfy.cli_args import args

    pages = Pages(model, **options)
    with monkeypatch.context() as patch:
        patch.setattr(comfy_aimdo.model_vbar, "vbar_fault", lambda allocation: pages.fault(allocation))
        patch.setattr(comfy_aimdo.model_vbar, "vbar_unpin", lambda allocation: pages.unpin(allocation))
        patch.setattr(comfy_aimdo.model_vbar, "vbar_signature_compare", lambda a, b: a is not None and a == b)
        patch.setattr(
            comfy_aimdo.torch, "aimdo_to_tensor", lambda a, device: a if isinstance(a, torch.Tensor) else pages.tensor(a)
        )
        patch.setattr(comfy.model_management, "get_offload_stream", lambda device: buffers and buffers.stream())
        patch.setattr(comfy.model_management, "get_aimdo_cast_buffer", lambda stream, device: buffers.of(stream))
        patch.setattr(args, "disable_pinned_memory", True)
        try:
            yield pages
        finally:
            pages.remove()
