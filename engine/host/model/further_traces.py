"""Put off further traces of a model that has code until they would have paid: ski rental, as in payback.py.

A batch or patch for which there is no code may come once. So its trace begins when the calls that lacked code, whatever for,
have lost what a trace costs, with those that the run still has when the code is there; what has code runs it meanwhile.
"""

import math
from dataclasses import dataclass

from ...compile.group import BlockGroup
from ...compile.registry import ModelCode
from ...settings import CompileSettings
from ...torch_compat import private
from .structure_record import Record

# Runs of at most so many steps cannot be timed.
UNTIMED = 2


@dataclass
class FurtherTraces:
    """Whether such a trace is put off. All calls are calls of the sampler, all seconds as the CPU sees them.

    Args:
        runs_to_go: in about how many runs what the last call lacked is traced; None: it lacked nothing.
        _lacking, _put_off: of the model's code when the last call began.
        _call: seconds of a call; `_called`: when the last one began.
        _traced: seconds of tracing in the run when the last call began.
        _at_once: the last run in which traces begin at once; `_pays`: in this one since they pay.
        _has_lacked: some call of this run has; `_is_untimed`: a run of few steps had lacked, whose loss is not known.
    """

    record: Record
    runs_to_go: int | None = None
    _lacking: int = 0
    _put_off: int = 0
    _call: float = 0.0
    _called: float = 0.0
    _traced: float = 0.0
    _at_once: int = 0
    _pays: bool = False
    _has_lacked: bool = False
    _is_untimed: bool = False

    def call_begins(self, code: ModelCode, number: int, steps: int, now: float) -> None:
        """Note that a call begins.

        Args:
            number: of the call in its run of so many `steps`, from 1.
            now: seconds of a clock.
        """
        if number > 2:  # the call before was not the first, which loads weights
            self._call = now - self._called
        if number > 1:
            self._count_last(code, steps)
        if code.put_off > self._put_off:  # first traces go on that had taken too long
            self.begin(code)
        self._called, self._put_off, self._traced = now, code.put_off, code.traced

    def run_ends(self, code: ModelCode, calls: int, steps: int) -> None:
        if calls:
            self._count_last(code, steps)
            self._is_untimed |= self._has_lacked and steps <= UNTIMED
            if code.traced > self._traced:  # the next call shows what this trace does not fit
                self._at_once = code.runs + 1
        if code.traced and self._pays:
            self.record.lost, self._is_untimed = 0.0, False
        self._pays = self._has_lacked = False

    def _count_last(self, code: ModelCode, steps: int) -> None:
        lacks, self._lacking = code.lacking > self._lacking, code.lacking
        self.runs_to_go = None
        self._has_lacked |= lacks
        if lacks:
            saved = self._call * self.record.expected_share
            self.record.lost += saved
            to_lose = max(0.0, self.record.expected_trace(2) - self.record.lost)
            self.runs_to_go = 1 if steps <= UNTIMED else max(1, math.ceil(to_lose / max(steps * saved, 1e-3)))

    def put_off(self, code: ModelCode, settings: CompileSettings, calls: int) -> bool:
        """Decide whether traces begin in a call; returns whether they do not. They do if graphs of a group have ever broken, as
        after a break nobody sees whether code is missing, and if code was discarded.

        Args:
            calls: how many the run still has, with this one.
        """
        groups, record = code.groups_of(settings), self.record
        runs_compiled = max(0.0, calls * self._call - max((group.code.lowering for group in groups), default=0.0))
        lost = record.lost + runs_compiled * record.expected_share
        self._pays |= self._is_untimed or lost >= record.expected_trace(2)
        if self._pays or any(map(_breaks_or_was_discarded, groups)) or not _have_code(groups):
            self.begin(code)
        return code.runs > self._at_once

    def begin(self, code: ModelCode) -> None:
        """Let traces begin at once in this run."""
        self._at_once = max(self._at_once, code.runs)

    def begin_for_all(self, code: ModelCode) -> None:
        """Let each trace begin at once, in this run, and in the next, which shows what this one has left."""
        self._at_once, self.runs_to_go = code.runs + 1, None


def _breaks_or_was_discarded(group: BlockGroup) -> bool:
    return bool(group.stats.graph_breaks or (group.code.version and not group.code.has_code))


def _have_code(groups: list[BlockGroup]) -> bool:
    """Whether any group has code: not after a reset of Dynamo. Another thread must not reset it meanwhile, so PyTorch's lock is
    held; where it cannot be had, some code is being made."""
    if not private.compile_lock.acquire(blocking=False):
        return True
    try:
        return any(group.code.variants() for group in groups)
    finally:
        private.compile_lock.release()
