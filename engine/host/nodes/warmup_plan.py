"""Parse the sizes that a warmup runs from the node's inputs, and measure the memory that the warmup takes.

The memory is RAM of this process and of the processes that compile beside it, and VRAM of the GPU that samples.
"""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
import torch

from ...errors import InvalidSetting
from ...user_input import check_text, check_whole

GIB = 2**30
MAX_PIXELS = 16384
MAX_FRAMES = 16384
MAX_BATCH = 4096
# The sampler runs once at each size; more sizes than this are a mistake.
MAX_SIZES = 100
MAX_TEXT = 10_000
_LIMITS = {"width": MAX_PIXELS, "height": MAX_PIXELS, "length": MAX_FRAMES, "batch": MAX_BATCH}
# In the command lines of processes that compile: ours (compile_process/child.py), inductor's (torch/_inductor/compile_worker).
_COMPILERS = "compile_process", "compile_worker"
_NUMBER = r"([0-9]{1,9})"
# "x" or the sign of multiplication
_SIZE = re.compile(rf"{_NUMBER}\s*[xX\u00d7]\s*{_NUMBER}(?:\s*[xX\u00d7]\s*{_NUMBER})?(?:\s+batch\s+{_NUMBER})?")


@dataclass(frozen=True)
class Size:
    """The size of one image or video, and how many are made at once."""

    width: int
    height: int
    length: int = 1  # frames
    batch: int = 1

    def __post_init__(self) -> None:  # ComfyUI checks the limits of typed numbers, not of linked ones
        for name, highest in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, highest)

    def label(self) -> str:
        return f"{self.entry()} batch {self.batch}"

    def entry(self) -> str:
        """As a line of extra_sizes, without the batch."""
        return f"{self.width}x{self.height}" + (f"x{self.length}" if self.length > 1 else "")


def parse_extra_sizes(text: str) -> list[Size]:
    """Read `WIDTHxHEIGHT` or `WIDTHxHEIGHTxLENGTH`, each with an optional ` batch N`, one a line or separated by commas or
    semicolons.

    Skips empty lines and lines that start with #.
    """
    check_text("extra_sizes", text)
    if len(text) > MAX_TEXT:
        raise InvalidSetting("extra_sizes", text, f"use at most {MAX_TEXT:,} characters.")
    sizes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith("#"):
            continue
        for entry in filter(None, map(str.strip, re.split("[,;]", line))):
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
    """Read the peaks of memory since the object was created. No counter is reset: other packs may watch them."""

    def __init__(self, device: torch.device, paged: Callable[[], int] = lambda: 0):
        # `paged` returns the bytes of weights that the host pages, which PyTorch's allocator does not count.
        self._device, self._paged = device, paged
        self._used, self._before = psutil.Process().memory_info().rss, peak_of_ram()

    def text(self) -> str:
        peak = peak_of_ram()
        # A warmup can use what was freed before: only a new peak says how much the warmup took.
        rise = f"{(peak - self._used) / GIB:.1f} GiB taken by" if peak > self._before else "not raised by"
        parts = [f"up to {peak / GIB:.1f} GiB of RAM, {rise} this warmup"]
        workers = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # `child` has just ended
                if any(name in word for word in child.cmdline() for name in _COMPILERS):
                    workers.append(child.memory_info().rss)
        if workers:
            parts.append(f"{sum(workers) / GIB:.1f} GiB in {len(workers)} processes that compile beside it")
        if self._device.type == "cuda":
            paged = f" and {self._paged() / GIB:.1f} GiB of weights that ComfyUI pages" if self._paged() else ""
            parts.append(f"up to {torch.cuda.max_memory_allocated(self._device) / GIB:.1f} GiB of VRAM{paged}")
        return f"Memory since the start: {'; '.join(parts)}."


def peak_of_ram() -> int:
    """The most bytes that this process has used since its start."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
