"""Draw a benchmark's result: the time of a step with its spread, and the image after which compiling has paid off."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..notices.words import say_in_english
from .figures import BenchmarkResult, duration

# Pixels of the drawing. The finished picture has half of them, which smooths edges; a node shows it at half its size.
WIDTH, HEIGHT, MARGIN, ROOM = 1920, 1640, 72, 1920 - 2 * 72
TITLE, MIDDLE, SMALL, SMALLEST = 56, 52, 48, 32
BACKGROUND, INK, MUTED, GRID = "#ffffff", "#16202e", "#5c6878", "#e3e7ed"
EAGER, COMPILED, SLOWER = "#9aa5b4", "#2563eb", "#c2410c"
BARS, LINES = (220, 600, 880, 1340), (1180, 600, 1820, 1340)  # left, top, right, bottom of what is inside the axes
UNITS = ((7200, 3600, "hours"), (120, 60, "minutes"), (1, 1, "seconds"), (0, 1e-3, "milliseconds"))


class Picture:
    def __init__(self, height: int = HEIGHT):
        self.image = Image.new("RGB", (WIDTH, height), BACKGROUND)
        self.pen = ImageDraw.Draw(self.image)

    def text(self, x: float, y: float, text: str, size: int, color: str, anchor="ls", bold=False, room: float = ROOM) -> tuple:
        """Write a line, in smaller letters and then with an ellipsis if it is wider than `room`; returns the box."""
        while True:
            style = {"anchor": anchor, "font": ImageFont.load_default(size), "stroke_width": size // 40 if bold else 0}
            box = self.pen.textbbox((x, y), text, **style)
            if box[2] - box[0] <= room:
                self.pen.rectangle(box, BACKGROUND)  # no grid line through a value
                self.pen.text((x, y), text, color, **style)
                return box
            size, text = (size - 2, text) if size > SMALLEST else (size, text.removesuffix("...")[:-1].rstrip(" ,") + "...")

    def axis(self, panel: tuple[int, int, int, int], highest: float) -> Callable[[float], float]:
        """Draw a grid from 0 to a little above `highest` seconds; returns a function from seconds to their y."""
        left, top, right, bottom = panel
        unit, name = next((size, name) for least, size, name in UNITS if highest >= least)
        highest = max(highest, 1e-9) * 1.15
        for value in _ticks(highest / unit):
            y = bottom - (bottom - top) * value * unit / highest
            self.pen.line([left, y, right, y], GRID if value else MUTED, 3)
            self.text(left - 28, y, f"{value:,.6g}", SMALL, MUTED, "rm")
        self.text(left - 28, top - 28, name, SMALL, MUTED)
        return lambda seconds: bottom - (bottom - top) * min(1.0, seconds / highest)

    def tensor(self) -> torch.Tensor:
        """As ComfyUI's IMAGE: `[1, height, width, 3]`, float, 0 to 1."""
        return torch.from_numpy(np.asarray(self.image.reduce(2), dtype=np.float32) / 255)[None]


def draw(result: BenchmarkResult) -> Picture:
    picture, color = Picture(), {"faster": COMPILED, "slower": SLOWER}.get(result.verdict, INK)
    picture.text(MARGIN, 132, result.headline(say_in_english), 88, color, bold=True)
    picture.text(MARGIN, 224, f"{result.model}, {result.heading()}", MIDDLE, INK)
    picture.text(MARGIN, 296, result.device, MIDDLE, MUTED)
    sides = {
        "uncompiled": (result.eager, EAGER),
        "compiled": (result.compiled, SLOWER if result.verdict == "slower" else COMPILED),
    }
    _draw_steps(picture, sides)
    _draw_totals(picture, result, sides)
    error = f"; error of the latent against uncompiled {result.error:.2g}" if math.isfinite(result.error) else ""
    text = f"{len(result.eager.steps)} warm steps each in {len(result.eager.rounds)} alternating rounds{error}"
    picture.text(MARGIN, HEIGHT - 40, text, SMALL, MUTED)
    return picture


def draw_message(text: str) -> Picture:
    picture = Picture(480)
    picture.text(MARGIN, 192, "Torch Compile Benchmark", 80, INK, bold=True)
    picture.text(MARGIN, 328, text, TITLE, MUTED)
    return picture


def _draw_steps(picture: Picture, sides: dict) -> None:
    left, top, right, bottom = BARS
    picture.text(MARGIN, top - 184, "Time per step", TITLE, INK, bold=True)
    picture.text(MARGIN, top - 116, "median, 8 of 10 steps", SMALL, MUTED, room=right - MARGIN)
    height_of = picture.axis(BARS, max(timing.spread[1] for timing, _ in sides.values()))
    for (name, (timing, color)), share in zip(sides.items(), (0.27, 0.73), strict=True):
        x, middle, (low, high) = left + (right - left) * share, height_of(timing.median), map(height_of, timing.spread)
        picture.pen.rectangle([x - 99, middle, x + 99, bottom], color)
        if low - high >= 6:  # else too narrow to be seen as a range
            picture.pen.line([x - 32, low, x + 32, low, x, low, x, high, x - 32, high, x + 32, high], INK, 5)
        picture.text(x, min(high, middle) - 24, duration(timing.median), 64, INK, "ms", bold=True, room=277)
        picture.text(x, bottom + 80, name, TITLE, INK, "ms")


def _draw_totals(picture: Picture, result: BenchmarkResult, sides: dict) -> None:
    """Time after any number of images: compiled starts later and catches up, or not."""
    left, top, right, bottom = LINES
    even, cost, edge = result.break_even, result.cost_seconds, left - 172
    never = "never, compiled is slower" if result.verdict == "slower" else "too close to tell"
    title = f"Break-even: {result.images(even) if even else never}"
    picture.text(edge, top - 184, title, TITLE, INK, bold=True, room=right - edge)
    picture.text(edge, top - 116, f"total time, with {duration(cost)} of first steps", SMALL, MUTED, room=right - edge)
    last, (eager, compiled) = max(4, 2 * even) if even else 10, (result.image_seconds(timing) for timing, _ in sides.values())
    height_of = picture.axis(LINES, max(last * eager, cost + last * compiled))
    for value in _ticks(last, whole=True):
        picture.text(left + (right - left) * value / last, bottom + 72, f"{value:,.0f}", SMALL, MUTED, "ms")
    picture.text((left + right) / 2, bottom + 144, "videos" if result.video else "images", SMALL, MUTED, "ms")
    legend: float = right - 460
    for (name, (_, color)), start, each in zip(sides.items(), (0, cost), (eager, compiled), strict=True):
        picture.pen.line([left, height_of(start), right, height_of(start + last * each)], color, 10)
        legend = picture.text(legend, top - 28, name, SMALL, color, bold=True)[2] + 32
    if even:
        crossing = cost / (eager - compiled)
        x, y = left + (right - left) * crossing / last, height_of(crossing * eager)
        picture.pen.line([x, bottom, x, y], INK, 4)
        picture.pen.ellipse([x - 22, y - 22, x + 22, y + 22], INK, BACKGROUND, 6)


def _ticks(highest: float, whole: bool = False) -> list[float]:
    """About five round numbers from 0 up to `highest`."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= highest / 4 * 0.999)
    step = max(1, round(step)) if whole else step
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]
