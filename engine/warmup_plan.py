"""Read the sizes that a warmup runs from the node's inputs, and measure the memory that it takes.

RAM of this process and of its compile workers, VRAM of the GPU that samples.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
import torch

from .errors import InvalidSetting
from .user_input import check_text, check_whole

GIB = 2**30
MAX_PIXELS = 16384
MAX_FRAMES = 16384
MAX_BATCH = 4096
# Each is a run of the sampler, and with it some seconds: more than these are a mistake.
MAX_SIZES = 100
MAX_TEXT = 10_000
_LIMITS = {"width": MAX_PIXELS, "height": MAX_PIXELS, "length": MAX_FRAMES, "batch": MAX_BATCH}
_NUMBER = r"([0-9]{1,9})"
_SIZE = re.compile(rf"{_NUMBER}\s*[xX]\s*{_NUMBER}(?:\s*[xX]\s*{_NUMBER})?(?:\s+batch\s+{_NUMBER})?")


@dataclass(frozen=True)
class Size:
    """What one image or video is asked for with.

    Args:
        width, height: pixels.
        length: frames; 1 for images.
        batch: images or videos at once.

    Raises:
        InvalidSetting: a number is beyond the limits of the nodes' inputs (which hold for typed numbers, not for linked ones).
    """

    width: int
    height: int
    length: int = 1
    batch: int = 1

    def __post_init__(self) -> None:
        for name, highest in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, highest)

    def label(self) -> str:
        frames = f"x{self.length}" if self.length > 1 else ""
        return f"{self.width}x{self.height}{frames} batch {self.batch}"


def parse_extra_sizes(text: str) -> list[Size]:
    """Read `WIDTHxHEIGHT` or `WIDTHxHEIGHTxLENGTH`, each with an optional ` batch N`, one a line or separated by commas.

    Empty lines and lines that start with # are passed over.

    Raises:
        InvalidSetting: something is no size, or beyond the limits; the message names the line.
    """
    check_text("extra_sizes", text)
    if len(text) > MAX_TEXT:
        raise InvalidSetting("extra_sizes", text, f"use at most {MAX_TEXT:,} characters.")
    sizes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith("#"):
            continue
        for entry in filter(None, map(str.strip, line.split(","))):
            match = _SIZE.fullmatch(entry)
            if match is None:
                raise InvalidSetting(
                    "extra_sizes", entry, f"line {number} is no size; write 1024x768, 832x480x33 or 1024x768 batch 2."
                )
            try:
                sizes.append(Size(*(int(group) if group else 1 for group in match.groups())))
            except InvalidSetting as error:
                raise InvalidSetting("extra_sizes", entry, f"line {number}: {error}") from None
    if len(sizes) > MAX_SIZES:
        raise InvalidSetting("extra_sizes", text, f"these are {len(sizes):,} sizes; use at most {MAX_SIZES}.")
    return sizes


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
