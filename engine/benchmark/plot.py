"""The benchmark as a picture: time per step with its spread, and the image at which compiling has paid off."""

from __future__ import annotations

import math

from .canvas import Canvas
from .figures import BenchmarkResult, Timing, duration

# A node shows it at half its size.
WIDTH, HEIGHT = 960, 820
MARGIN = 36
TITLE, SMALL = 28, 24
BACKGROUND, INK, MUTED, GRID = "#ffffff", "#16202e", "#5c6878", "#e3e7ed"
EAGER, COMPILED, SLOWER = "#9aa5b4", "#2563eb", "#c2410c"
# The panels: left, top, right, bottom of what is drawn inside the axes.
BARS = (110, 300, 440, 670)
LINES = (590, 300, WIDTH - 50, 670)


def draw(result: BenchmarkResult, canvas: Canvas | None = None) -> Canvas:
    """The plot of `result`.

    Args:
        canvas: `WIDTH` by `HEIGHT`, a new one if None.
    """
    canvas = canvas or Canvas(WIDTH, HEIGHT, BACKGROUND)
    _header(canvas, result)
    _bars(canvas, result)
    _totals(canvas, result)
    _footer(canvas, result)
    return canvas


def draw_message(text: str) -> Canvas:
    """A picture that only says something."""
    canvas = Canvas(WIDTH, 240, BACKGROUND)
    canvas.text(MARGIN, 96, "Torch Compile Benchmark", 40, INK, bold=True)
    canvas.text(MARGIN, 164, text, 28, MUTED, room=WIDTH - 2 * MARGIN)
    return canvas


def _header(canvas: Canvas, result: BenchmarkResult) -> None:
    room = WIDTH - 2 * MARGIN
    color = {"faster": COMPILED, "slower": SLOWER}.get(result.verdict, INK)
    canvas.text(MARGIN, 66, result.headline(), 44, color, bold=True, room=room)
    canvas.text(MARGIN, 112, f"{result.model}, {result.heading()}", 26, INK, room=room)
    canvas.text(MARGIN, 148, result.device, 26, MUTED, room=room)


def _bars(canvas: Canvas, result: BenchmarkResult) -> None:
    left, top, right, bottom = BARS
    canvas.text(MARGIN, top - 92, "Time per step", TITLE, INK, bold=True)
    canvas.text(MARGIN, top - 58, "median, 8 of 10 steps", SMALL, MUTED, room=right - MARGIN)
    sides = [("eager", result.eager, EAGER), ("compiled", result.compiled, _compiled_color(result))]
    scale = _Scale(max(side.spread[1] for _, side, _ in sides))
    _grid(canvas, BARS, scale)
    width = (right - left) * 0.3
    for index, (name, timing, color) in enumerate(sides):
        x = left + (right - left) * (0.27 + 0.46 * index)
        canvas.box(x - width / 2, scale.y(timing.median, BARS), x + width / 2, bottom, color, radius=4)
        highest = _whisker(canvas, timing, x, scale)
        _label(canvas, x, highest - 12, duration(timing.median), width * 1.4)
        canvas.text(x, bottom + 40, name, TITLE, INK, "ms")
    canvas.line([(left, bottom), (right, bottom)], MUTED, 2)


def _label(canvas: Canvas, x: float, y: float, text: str, room: float) -> None:
    half = min(room, canvas.text_width(text, 32)) / 2 + 8
    canvas.box(x - half, y - 34, x + half, y + 4, BACKGROUND)  # no grid line through the value
    canvas.text(x, y, text, 32, INK, "ms", bold=True, room=room)


def _whisker(canvas: Canvas, timing: Timing, x: float, scale: _Scale) -> float:
    """Where its upper end is."""
    low, high = (scale.y(value, BARS) for value in timing.spread)
    if low - high < 3:  # too narrow to be seen as one
        return min(high, scale.y(timing.median, BARS))
    canvas.line([(x, low), (x, high)], INK, 2.5)
    for end in (low, high):
        canvas.line([(x - 16, end), (x + 16, end)], INK, 2.5)
    return high


def _totals(canvas: Canvas, result: BenchmarkResult) -> None:
    """Time after any number of images: compiled starts later and catches up, or not."""
    left, top, right, bottom = LINES
    noun = "videos" if result.video else "images"
    even, unclear = result.break_even, "too close to tell" if result.verdict != "slower" else "never, compiled is slower"
    title = f"Break-even: {result.images(even) if even else unclear}"
    canvas.text(left - 86, top - 92, title, TITLE, INK, bold=True, room=right - left + 86)
    detail = f"total time, with {duration(result.cost_seconds)} of first steps"
    canvas.text(left - 86, top - 58, detail, SMALL, MUTED, room=right - left + 86)
    last = max(4, 2 * even) if even else 10
    eager, compiled = result.image_seconds(result.eager), result.image_seconds(result.compiled)
    cost = result.cost_seconds
    scale = _Scale(max(last * eager, cost + last * compiled))
    _grid(canvas, LINES, scale)
    for value in _ticks(last, whole=True):
        x = left + (right - left) * value / last
        canvas.text(x, bottom + 36, f"{value:,.0f}", SMALL, MUTED, "ms")
    canvas.text((left + right) / 2, bottom + 72, noun, SMALL, MUTED, "ms")
    canvas.line([(left, bottom), (right, bottom)], MUTED, 2)
    ends = []
    for start, each, color in ((0, eager, EAGER), (cost, compiled, _compiled_color(result))):
        ends.append(scale.y(start + last * each, LINES))
        canvas.line([(left, scale.y(start, LINES)), (right, ends[-1])], color, 5)
    _legend(canvas, result)
    if even:
        crossing = cost / (eager - compiled)
        x, y = left + (right - left) * crossing / last, scale.y(crossing * eager, LINES)
        canvas.line([(x, bottom), (x, y)], INK, 2, dash=6)
        canvas.dot(x, y, 8, INK, BACKGROUND)


def _legend(canvas: Canvas, result: BenchmarkResult) -> None:
    """The names in the colours of their lines."""
    end: float
    _, top, end, _ = LINES
    for name, color in (("compiled", _compiled_color(result)), ("eager", EAGER)):
        start, *_ = canvas.text(end, top - 14, name, SMALL, color, "rs", bold=True)
        end = start - 16


def _footer(canvas: Canvas, result: BenchmarkResult) -> None:
    error = f"; error of the latent against eager {result.error:.2g}" if math.isfinite(result.error) else ""
    text = f"{len(result.eager.steps)} warm steps each in {len(result.eager.rounds)} alternating rounds{error}"
    canvas.text(MARGIN, HEIGHT - 20, text, SMALL, MUTED, room=WIDTH - 2 * MARGIN)


def _compiled_color(result: BenchmarkResult) -> str:
    return SLOWER if result.verdict == "slower" else COMPILED


class _Scale:
    """A vertical axis from 0 to a little above `highest` seconds, in the unit that suits it."""

    def __init__(self, highest: float):
        highest = max(highest, 1e-9)
        units = ((7200, 3600, "hours"), (120, 60, "minutes"), (1, 1, "seconds"), (0, 1e-3, "milliseconds"))
        self.unit_seconds, self.unit = next((size, name) for least, size, name in units if highest >= least)
        self.highest = highest * 1.15

    def y(self, seconds: float, panel: tuple[int, int, int, int]) -> float:
        return panel[3] - (panel[3] - panel[1]) * min(1.0, seconds / self.highest)

    def ticks(self) -> list[float]:
        return _ticks(self.highest / self.unit_seconds)


def _grid(canvas: Canvas, panel: tuple[int, int, int, int], scale: _Scale) -> None:
    left, top, right, _ = panel
    for value in scale.ticks():
        y = scale.y(value * scale.unit_seconds, panel)
        canvas.line([(left, y), (right, y)], GRID, 1.5)
        canvas.text(left - 14, y, f"{value:,.6g}", SMALL, MUTED, "rm")
    canvas.text(left - 14, top - 14, scale.unit, SMALL, MUTED, "ls")


def _ticks(highest: float, whole: bool = False) -> list[float]:
    """About five round numbers from 0 up to `highest`."""
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]
