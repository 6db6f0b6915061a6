"""A small drawing surface over PIL: smooth shapes, and text that fits.

ComfyUI brings PIL but no plotting library. Shapes are drawn at twice the size and scaled down, which smooths their edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

_SCALE = 2
# The smallest text that stays readable in a node's preview.
MIN_TEXT = 16


class Canvas:
    """Coordinates and sizes in pixels of the finished image, colours as `#rrggbb`.

    Args:
        width, height: of the finished image.
        background: colour.
    """

    def __init__(self, width: int, height: int, background: str):
        self.width, self.height = width, height
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), background)
        self._draw = ImageDraw.Draw(self._image)

    def box(self, left: float, top: float, right: float, bottom: float, color: str, radius: float = 0) -> None:
        corners = [round(v * _SCALE) for v in (left, top, max(left, right), max(top, bottom))]
        self._draw.rounded_rectangle(corners, min(radius * _SCALE, (corners[3] - corners[1]) / 2), color)

    def line(self, points: list[tuple[float, float]], color: str, width: float = 2, dash: float = 0) -> None:
        """A polyline; with `dash`, one straight line of dashes of that length."""
        if dash:
            start, end = points
            points, pieces = self._dashes(start, end, dash), True
        else:
            pieces = False
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        for piece in zip(scaled[::2], scaled[1::2], strict=True) if pieces else [scaled]:
            self._draw.line(list(piece), color, round(width * _SCALE), joint="curve")

    @staticmethod
    def _dashes(start: tuple[float, float], end: tuple[float, float], dash: float) -> list[tuple[float, float]]:
        length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
        count = max(1, int(length / dash / 2)) * 2 - 1
        return [
            (start[0] + (end[0] - start[0]) * index / count, start[1] + (end[1] - start[1]) * index / count)
            for piece in range(0, count, 2)
            for index in (piece, piece + 1)
        ]

    def dot(self, x: float, y: float, radius: float, color: str, rim: str) -> None:
        for size, fill in ((radius + 3, rim), (radius, color)):
            self._draw.ellipse([(v * _SCALE) for v in (x - size, y - size, x + size, y + size)], fill)

    def text(
        self, x: float, y: float, text: str, size: int, color: str, anchor: str = "ls", bold: bool = False, room: float = 0
    ) -> tuple[float, float, float, float]:
        """Write one line.

        Args:
            anchor: as in PIL: l, m, r and then a, m, s, d for the point (x, y).
            room: pixels of width it may take; smaller text, then an ellipsis, make it fit.

        Returns:
            Its left, top, right and bottom.
        """
        stroke: dict[str, Any] = {"stroke_width": max(1, size * _SCALE // 40), "stroke_fill": color} if bold else {}
        text, size = self._fitted(text, size, room, stroke)
        box = self._box(x, y, text, size, anchor, stroke)
        self._draw.text((x * _SCALE, y * _SCALE), text, color, _font(size), anchor, **stroke)
        return box

    def text_width(self, text: str, size: int) -> float:
        return _font(size).getlength(text) / _SCALE

    def _fitted(self, text: str, size: int, room: float, stroke: dict) -> tuple[str, int]:
        def fits(words: str) -> bool:
            left, _, right, _ = self._box(0, 0, words, size, "ls", stroke)
            return not room or right - left <= room

        while size > MIN_TEXT and not fits(text):
            size -= 1
        if not fits(text):
            while len(text) > 1 and not fits(text + "..."):
                text = text[:-1]
            text = text.rstrip(" ,") + "..."
        return text, size

    def _box(self, x: float, y: float, text: str, size: int, anchor: str, stroke: dict) -> tuple[float, float, float, float]:
        width = stroke.get("stroke_width", 0)
        box = self._draw.textbbox((x * _SCALE, y * _SCALE), text, _font(size), anchor, stroke_width=width)
        left, top, right, bottom = (v / _SCALE for v in box)
        return left, top, right, bottom

    def image(self) -> Image.Image:
        return self._image.resize((self.width, self.height), Image.Resampling.LANCZOS)

    def tensor(self) -> torch.Tensor:
        """As ComfyUI's IMAGE: `[1, height, width, 3]`, float, 0 to 1."""
        return torch.from_numpy(np.asarray(self.image(), dtype=np.float32) / 255)[None]


_fonts: dict[int, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """PIL's own font, the same on every machine; it knows plain letters only."""
    if size not in _fonts:
        _fonts[size] = ImageFont.load_default(size * _SCALE)
    return _fonts[size]
