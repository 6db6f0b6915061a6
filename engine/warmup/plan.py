"""Which sizes to warm up, read from the node's inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidSetting
from ..user_input import check_text, check_whole

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
