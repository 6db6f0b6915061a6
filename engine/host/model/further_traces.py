"""Put off further traces of a model that has code until they would have paid: ski rental, as in payback.py.

A batch or patch for which there is no code may come once. So its trace begins when the calls that lacked it have lost what it
costs, with those that the run still has; what has code runs it meanwhile.
"""

import math
from dataclasses import dataclass

from ...compile.group import BlockGroup
from ...compile.registry import ModelCode
from ...settings import CompileSettings
from ...torch_compat import private

# Runs with at most so many calls of the sampler cannot be timed.
UNTIMED = 2


@dataclass
class FurtherTraces:
    """Whether such a trace is put off. All calls are calls of the sampler, all seconds as the CPU sees them.

    Args:
        lacks: the last call lacked code.
        _lost: seconds that code would have saved in calls that lacked it, since the last trace.
        _lacking, _put_off: of the model's code when the last call began.
        _call: seconds of a call; `_called`: when the last one began.
        _traced: seconds of tracing in the run when the last call began.
        _at_once: the last run in which traces begin at once.
    """

    lacks: bool = False
    _lost: float = 0.0
    _lacking: int = 0
    _put_off: int = 0
    _call: float = 0.0
    _called: float = 0.0
    _traced: float = 0.0
    _at_once: int = 0

    def call_begins(self, code: ModelCode, number: int, share: float, now: float) -> None:
        """Note that a call begins.

        Args:
            number: of the call in its run, from 1.
            share: of a call's time that code saves.
            now: seconds of a clock.
        """
        if number > 2:  # the call before was not the first, which loads weights
            self._call = now - self._called
        if number > 1:
            self._count(code, share)
        if code.put_off > self._put_off:  # first traces go on that had taken too long
            self.begin_now(code)
        self._called, self._put_off, self._traced = now, code.put_off, code.traced

    def run_ends(self, code: ModelCode, calls: int, share: float) -> None:
        if calls:
            self._count(code, share)
            if self.lacks and calls <= UNTIMED:
                self._lost = math.inf
        if code.traced:
            self._lost = 0.0
        if code.traced > self._traced:  # the next call shows what this trace does not fit
            self._at_once = code.runs + 1

    def _count(self, code: ModelCode, share: float) -> None:
        """Count the last call."""
        self.lacks = code.lacking > self._lacking
        self._lacking = code.lacking
        if self.lacks:
            self._lost += self._call * share

    def are_put_off(self, code: ModelCode, settings: CompileSettings, calls: int, share: float, cost: float) -> bool:
        """Whether no trace begins in this call. Not if graphs break: after a break nobody sees whether code is missing.

        Args:
            calls: how many the run still has, with this one.
            cost: seconds of a trace.
        """
        groups = code.groups_of(settings)
        pays = self._lost + calls * self._call * share >= cost
        if pays or any(group.stats.graph_breaks for group in groups) or not _have_code(groups):
            self.begin_now(code)
        return code.runs > self._at_once

    def begin_now(self, code: ModelCode, also_next: bool = False) -> None:
        """Let traces begin at once in this run. `also_next`: and in the next, which shows what this one has left."""
        self._at_once = max(self._at_once, code.runs + also_next)

    def runs_to_go(self, calls: int, share: float, cost: float) -> int:
        """In about how many runs of so many calls a trace begins."""
        return max(1, math.ceil(max(0.0, cost - self._lost) / max(calls * self._call * share, 1e-3)))


def _have_code(groups: list[BlockGroup]) -> bool:
    """Whether any group has code: not after a reset of Dynamo, which, on another thread, must not happen meanwhile."""
    if not private.compile_lock.acquire(blocking=False):
        return True
    try:
        return any(group.code.variants() for group in groups)
    finally:
        private.compile_lock.release()
