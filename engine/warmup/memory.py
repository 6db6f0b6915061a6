"""How much memory compiling took at most: RAM of this process and of its compile workers, VRAM of the GPU that samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
import torch

GIB = 2**30


class MemoryPeaks:
    """Peaks since the object was created. No counter is reset: other packs may watch them.

    Args:
        device: that samples.
        paged: tells the bytes of weights there that PyTorch's allocator does not count, as the host pages them.
    """

    def __init__(self, device: torch.device, paged: Callable[[], int] = lambda: 0):
        self._device, self._paged = device, paged
        self._used, self._before = psutil.Process().memory_info().rss, peak_of_ram()

    def text(self) -> str:
        """A sentence for the report."""
        peak = peak_of_ram()
        # What was freed before it began can be used again: only a new peak says how much it took.
        taken = (
            f"{(peak - self._used) / GIB:.1f} GiB taken by this warmup" if peak > self._before else "not raised by this warmup"
        )
        parts = [f"up to {peak / GIB:.1f} GiB of RAM, {taken}"]
        workers = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if any("compile_worker" in word for word in child.cmdline()):  # of inductor (torch/_inductor/compile_worker)
                    workers.append(child.memory_info().rss)
        if workers:
            parts.append(f"{sum(workers) / GIB:.1f} GiB in {len(workers)} processes that compile beside it")
        if self._device.type == "cuda":
            paged = f" and {self._paged() / GIB:.1f} GiB of weights that ComfyUI pages" if self._paged() else ""
            parts.append(f"up to {torch.cuda.max_memory_allocated(self._device) / GIB:.1f} GiB of VRAM{paged}")
        return f"Memory since the start: {'; '.join(parts)}."


def peak_of_ram() -> int:
    """Of this process since its start, in bytes."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
