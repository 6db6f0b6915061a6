"""Which of two ways to run a function is faster, measured on calls that are made anyway: nothing is computed twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# The ways of the first calls of a shape: the plain one first, for which nobody waits, and each once before it is timed.
TURNS = (False, True, True, False)
# Taken only where it needs at most this share of the plain way's time.
WORTH = 0.95


class Timer:
    """Seconds on the device between two moments of its stream, once it has passed both; the CPU is not made to wait."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list = [self._mark()]

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float | None:
        """None: it is not there yet, or the call ended with an error."""
        if len(self._marks) < 2:
            return None
        begin, end = self._marks
        if not self._on_gpu:
            return end - begin
        return begin.elapsed_time(end) / 1000 if end.query() else None


@dataclass
class _Shape:
    turn: int = 0
    timers: dict[bool, Timer] = field(default_factory=dict)


@dataclass
class Trial:
    """Plain, other, other, plain: then the faster way, for all shapes.

    Args:
        other: whether the other way is taken; None: not known yet.
        plain_seconds, other_seconds: what decided.
        timer: starts a `Timer`.
    """

    timer: Callable[[], Timer]
    other: bool | None = None
    plain_seconds: float = 0.0
    other_seconds: float = 0.0
    _shapes: dict[Hashable, _Shape] = field(default_factory=dict)

    def next(self, shape: Hashable, possible: bool) -> bool:
        """Whether this call goes the other way.

        Args:
            possible: it can; else its turn comes later.
        """
        if self.other is None:
            self._decide()
        if self.other is not None:
            return self.other and possible
        seen = self._shapes.setdefault(shape, _Shape())
        return possible and seen.turn < len(TURNS) and TURNS[seen.turn]

    @contextmanager
    def timed(self, shape: Hashable, way: bool) -> Iterator[None]:
        """Around that call; one that ends with an error is not counted."""
        seen = self._shapes.get(shape)
        if self.other is not None or seen is None or seen.turn >= len(TURNS) or TURNS[seen.turn] != way:
            yield
            return
        timer = self.timer()
        yield
        timer.stop()
        seen.timers[way] = timer  # the second of each way replaces the first
        seen.turn += 1

    def give_up(self) -> None:
        """The other way does not work here."""
        self.other = False
        self._shapes.clear()

    def _decide(self) -> None:
        for seen in self._shapes.values():
            if seen.turn < len(TURNS):
                continue
            plain, other = (seen.timers[way].seconds() for way in (False, True))
            if plain is not None and other is not None:
                self.plain_seconds, self.other_seconds = plain, other
                self.other = other <= WORTH * plain
                self._shapes.clear()
                return
