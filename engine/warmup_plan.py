"""Which sizes to warm up, read from the node's inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import InvalidSetting

_SIZE = re.compile(r"^(\d+)\s*[xX]\s*(\d+)(?:\s*[xX]\s*(\d+))?(?:\s+batch\s+(\d+))?$")


@dataclass(frozen=True)
class Size:
    """What one image or video is asked for with.

    Args:
        width, height: pixels.
        length: frames; 1 for images.
        batch: images or videos at once.
    """

    width: int
    height: int
    length: int = 1
    batch: int = 1

    def label(self) -> str:
        frames = f"x{self.length}" if self.length > 1 else ""
        return f"{self.width}x{self.height}{frames} batch {self.batch}"


def parse_extra_sizes(text: str) -> list[Size]:
    """Read one `WIDTHxHEIGHT` or `WIDTHxHEIGHTxLENGTH` a line, each with an optional ` batch N`.

    Empty lines and lines that start with # are passed over.

    Raises:
        InvalidSetting: a line is no size; the message names the line.
    """
    sizes = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _SIZE.match(line)
        if match is None or any(group is not None and int(group) == 0 for group in match.groups()):
            raise InvalidSetting(
                "extra_sizes", line, f"line {number} is no size; write 1024x768, 832x480x33 or 1024x768 batch 2."
            )
        width, height, length, batch = (int(group) if group else 1 for group in match.groups())
        sizes.append(Size(width, height, length, batch))
    return sizes
