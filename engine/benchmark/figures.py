"""Compare the steps of eager and of compiled rounds, and write the table."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch

from ..messages.words import counted, say

# Share by which the medians of eager and compiled steps must differ for the verdict `faster` or `slower`.
CLEAR = 0.01
BAR_LENGTH = 40
AGAIN = "change the steps and run it again (ComfyUI runs no node twice with the same inputs)"


@dataclass(frozen=True)
class Timing:
    """Seconds of each step, one tuple a round; at least one round of at least one step."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def steps(self) -> list[float]:
        return sorted(step for steps in self.rounds for step in steps)

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def fastest(self) -> float:
        return self.steps[0]

    @property
    def spread(self) -> tuple[float, float]:
        """The times between which eight of ten steps lie."""
        deciles = statistics.quantiles(self.steps if len(self.steps) > 1 else 2 * self.steps, n=10, method="inclusive")
        return deciles[0], deciles[-1]


@dataclass(frozen=True)
class CompileCost:
    """What compiling has cost in this process, for one model and settings, at all sizes."""

    seconds: float
    graphs: int
    graphs_before: int  # of `graphs`, those from before the benchmark
    from_disk: int  # graphs whose code was on disk when the benchmark began
    first_steps: tuple[float, ...]  # seconds of the benchmark's first compiled steps, before anything was measured

    @property
    def cold(self) -> bool:
        """Whether everything was compiled inside the benchmark."""
        return self.graphs > 0 and not self.graphs_before


@dataclass(frozen=True)
class Trace:
    """Traces of one eager and one compiled step."""

    unit: str  # what is counted: CUDA kernels, XPU kernels, operators
    eager: int  # how many units the step ran
    compiled: int
    files: tuple[str, ...]  # eager first, relative to the output folder


@dataclass(frozen=True)
class BenchmarkResult:
    """The alternating eager and compiled rounds, and all else that the table shows."""

    model: str
    device: str
    settings: str
    size: str
    steps: int  # of one image, and of each round
    cfg: float
    batch: int
    eager: Timing
    compiled: Timing
    cost: CompileCost
    error: float  # relative error of the final latent, compiled against eager
    repeat_error: float  # the same, of one eager round against another
    late_graphs: int = 0  # graphs compiled in the measured rounds
    video: bool = False
    trace: Trace | None = None
    limits: list[str] = field(default_factory=list)  # lines that say where the time of a prompt goes, largest part first
    notes: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """How many times as fast compiled is; below 1 it is slower."""
        return self.eager.median / self.compiled.median

    @property
    def verdict(self) -> str:
        """`faster` or `slower` by `CLEAR` or more, where the spreads do not overlap; else `no clear difference`.

        Medians of rounds are not compared: with three equally fast rounds a side, one side's are all slower one time in 20.
        """
        (fast, slow), (compiled_fast, compiled_slow) = self.eager.spread, self.compiled.spread
        if compiled_slow < fast and self.speedup >= 1 + CLEAR:
            return "faster"
        return "slower" if compiled_fast > slow and 1 / self.speedup >= 1 + CLEAR else "no clear difference"

    @property
    def is_noisy(self) -> bool:
        """Whether the medians differ by `CLEAR` or more, but the spreads overlap."""
        return self.verdict == "no clear difference" and abs(self.speedup - 1) >= CLEAR

    def image_seconds(self, timing: Timing) -> float:
        """Seconds of sampling for one image, all its steps."""
        return timing.median * self.steps / self.batch

    @property
    def cost_seconds(self) -> float:
        """Seconds that compiling has cost. In a cold benchmark: at least what the first steps took longer than warm ones."""
        extra = sum(max(0.0, first - self.compiled.median) for first in self.cost.first_steps)
        return max(self.cost.seconds, extra) if self.cost.cold else self.cost.seconds

    @property
    def break_even(self) -> int | None:
        """Images after which compiling has paid off; None if compiled is not faster."""
        if self.verdict != "faster":
            return None
        return max(1, math.ceil(self.cost_seconds / (self.image_seconds(self.eager) - self.image_seconds(self.compiled))))

    def headline(self) -> str:
        if self.verdict == "slower":
            return say("timesSlower", digits(1 / self.speedup))
        if self.verdict != "faster":
            return say("tooNoisy" if self.is_noisy else "noClearDifference")
        times = digits(self.speedup)
        if not self.cost.graphs:
            return say("timesAsFast", times)
        return say("paidOffByVideo" if self.video else "paidOffByImage", times, self.break_even)

    def table(self) -> str:
        """All figures as text; the columns need a font of fixed width."""
        lines = [self.headline(), *filter(None, [say("figuresInEnglish")])]
        lines += [f"{self.model}, {self.size}, {counted(self.steps, 'step')}, cfg {self.cfg:g}"]
        lines += [f"{self.device}, {self.settings}", *self._bars(), "", *self._columns(), "", self._conclusion()]
        lines += [*(["", *self.limits, ""] if self.limits else []), *self._cost_lines()]
        error = "none to give, a latent holds values that are not finite"
        if math.isfinite(self.error):
            error = f"{self.error:.2g} (uncompiled against itself: {self.repeat_error:.2g})"
        lines.append(f"Relative error of the final latent against uncompiled: {error}.")
        steps, rounds = len(self.eager.steps), len(self.eager.rounds)
        lines.append(f"Measured: {steps} warm steps each in {rounds} alternating rounds, same seed.")
        if self.late_graphs:
            graphs = f"{counted(self.late_graphs, 'graph')} {'was' if self.late_graphs == 1 else 'were'}"
            lines.append(f"{graphs} compiled while measuring: for clean figures, {AGAIN}.")
        lines += self.notes
        if self.trace:
            lines += ["Traces of one step, in the output folder, for ui.perfetto.dev:", *(f"  {f}" for f in self.trace.files)]
        return "\n".join(lines)

    def _bars(self) -> list[str]:
        medians = {"uncompiled": self.eager.median, "compiled": self.compiled.median}
        signs = {name: max(1, round(BAR_LENGTH * median / max(medians.values()))) for name, median in medians.items()}
        return [f"{name:<10} {'█' * signs[name]} {duration(median)}" for name, median in medians.items()]

    def _columns(self) -> list[str]:
        rows = [
            ("", "uncompiled", "compiled"),
            ("a step, median", *(duration(side.median) for side in (self.eager, self.compiled))),
            ("  8 of 10 steps", *(between(*side.spread) for side in (self.eager, self.compiled))),
            ("  fastest", *(duration(side.fastest) for side in (self.eager, self.compiled))),
            (self._an_image, *(duration(self.image_seconds(side)) for side in (self.eager, self.compiled))),
        ]
        if self.trace:
            rows.append((f"{self.trace.unit} a step", f"{self.trace.eager:,}", f"{self.trace.compiled:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [f"{name:<{widths[0]}}  {eager:>{widths[1]}}  {compiled:>{widths[2]}}" for name, eager, compiled in rows]

    @property
    def _an_image(self) -> str:
        return "a video" if self.video else "an image"

    def _conclusion(self) -> str:
        step = duration(abs(self.eager.median - self.compiled.median))
        image = duration(abs(self.image_seconds(self.eager) - self.image_seconds(self.compiled)))
        if self.verdict == "faster":
            return f"Compiled saves {step} a step, {image} {self._an_image}."
        if self.verdict == "slower":
            advice = "It never pays off here: set backend to none, or try another mode."
            return f"Compiled takes {step} more a step, {image} more {self._an_image}.\n{advice}"
        if not self.is_noisy:
            return f"The two differ by under {100 * CLEAR:g} %. More steps measure more exactly."
        cause = "something kept the machine busy, or more steps are needed"
        return f"The steps of the two overlap (8 of 10 steps, above): {cause}. To know more, {AGAIN}."

    def _cost_lines(self) -> list[str]:
        cost, compiling, graphs = self.cost, duration(self.cost.seconds), counted(self.cost.graphs, "graph")
        if not cost.graphs:
            return ["Nothing was compiled: every block runs uncompiled."]
        if cost.cold:
            longer = f"{duration(self.cost_seconds)} longer than warm steps"
            lines = [f"First-step cost: {longer}, {compiling} of it compiling {graphs}."]
        else:
            compiling = f"Compiling took {compiling} in this process ({graphs}, all sizes so far)."
            lines = [f"Already warm when the benchmark began. {compiling}"]
        if cost.from_disk:
            lines.append("Code was read from the cache on disk: the very first time takes longer.")
        if self.break_even:
            lines.append(f"Break-even: after {counted(self.break_even, 'video' if self.video else 'image')}.")
        return lines


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of `expected`; 0 if equal, inf or nan if one is not finite or `expected` is zero."""
    difference, norm = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf


def duration(seconds: float) -> str:
    """Three digits in the unit a reader would use: `138 ms`, `1.06 s`, `2 min 5 s`, `1 h 3 min`."""
    if seconds < 0.9995:
        return f"{digits(seconds * 1000)} ms"
    if seconds < 119.5:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def between(low: float, high: float) -> str:
    """`174 - 176 ms`, with both units where they differ."""
    (low_digits, _, low_unit), (_, _, high_unit) = duration(low).partition(" "), duration(high).partition(" ")
    if duration(low) == duration(high):
        return duration(low)
    return f"{low_digits if low_unit == high_unit else duration(low)} - {duration(high)}"


def digits(value: float) -> str:
    """Three significant digits of a value below a thousand; trailing zeros stay."""
    return f"{value:#.3g}".rstrip(".") if value else "0"
