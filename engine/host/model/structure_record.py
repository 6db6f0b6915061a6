"""Keep run times and decisions for all models of one structure: in memory, and on disk beside their code."""

import functools
import json
import math
from contextlib import suppress
from dataclasses import dataclass

from ...cache.code_store import CodeStore, current
from ...cache.structure import short_name
from ...threads import call_later

# Seconds that tracing takes where it was not measured.
TRACE = 2.0
# Share of a step that compiling saves where it was not measured (docs/measurements.md: 0.19 and more; 0.14 and more of a UNet's
# replayed operators).
SAVED = 0.2
# The most records that are kept in memory.
MOST_RECORDS = 32
# Seconds from a run until its numbers are written: not at once, as a user's folder may be on a slow network.
KEEP_AFTER = 30.0
# Choices in the store: the structure was compiled, the user has asked for that (both with the value YES), its record's numbers.
CHOICE, ASKED, YES, NUMBERS = "compiled", "compile now", "yes", "payback"


@dataclass
class Record:
    """Run times and decisions for all models of one structure.

    Args:
        seconds: that uncompiled calls of the model took, in `runs` runs of the sampler.
        share: measured share of a step's time that compiled code saves; 0: not measured.
        trace: seconds of tracing in a session's first run that traced, the least of all sessions; 0: no run has traced.
        sessions: number of earlier sessions; `session_runs`: number of their runs, compiled or not.
        is_kept: a run has traced the structure, in this session or before, so that its code is on disk.
        is_decided: the structure is compiled in this session.
        is_asked: the user has asked for that, in this session or before.
        runs_now: number of runs in this session.
        lost: seconds that calls have lost for lack of code; 0 again when code was made because of that.
    """

    structure: str
    seconds: float = 0.0
    runs: float = 0
    share: float = 0.0
    trace: float = 0.0
    sessions: float = 0
    session_runs: float = 0
    is_kept: bool = False
    is_decided: bool = False
    is_asked: bool = False
    runs_now: int = 0
    lost: float = 0.0
    _has_traced: bool = False
    _is_waiting: bool = False

    @classmethod
    def recalled(cls, structure: str) -> "Record":
        store = current()
        choices = store.choices(structure) if store is not None else {}
        is_asked = choices.get(ASKED) == YES
        record = cls(structure, is_kept=choices.get(CHOICE) == YES, is_decided=is_asked, is_asked=is_asked)
        with suppress(ValueError, TypeError, OverflowError, RecursionError):
            numbers = [float(number) for number in json.loads(choices.get(NUMBERS, ""))]
            if len(numbers) == 6 and all(0 <= number < math.inf for number in numbers):
                record.seconds, record.runs, record.share, record.trace, record.sessions, record.session_runs = numbers
        return record

    def keep(self) -> None:
        """Write the record in KEEP_AFTER seconds, once for all runs until then, on another thread than the sampler's."""
        store = current()
        if store is not None and not self._is_waiting:
            self._is_waiting = True
            call_later(KEEP_AFTER, functools.partial(self._write, store))

    def _write(self, store: CodeStore) -> None:
        self._is_waiting = False
        sessions = self.sessions + 1, self.session_runs + self.runs_now
        numbers = json.dumps([self.seconds, self.runs, self.share, self.trace, *sessions])
        store.remember(self.structure, {NUMBERS: numbers, **({CHOICE: YES} if self.is_kept else {})})

    def ask(self) -> None:
        """Note that the user wants the structure compiled; not in NUMBERS, which another server on this store overwrites."""
        self.is_decided = self.is_asked = True
        if (store := current()) is not None:
            store.remember(self.structure, {ASKED: YES})

    def add_trace(self, seconds: float) -> None:
        """Note how long a run has traced. A session's first run counts, as later ones trace other sizes or patches, and of all
        sessions the shortest: after a long one, on a busy machine, the structure would never be traced and measured again."""
        self.is_kept = self.is_decided = True
        if not self._has_traced:
            self._has_traced, self.trace = True, min(seconds, self.trace or seconds)
            others = record_of(_any_structure())
            others.trace = math.sqrt(seconds * (others.trace or TRACE))  # half way, as a structure may be an exception
            others.keep()

    @property
    def expected_share(self) -> float:
        return self.share or SAVED

    def expected_trace(self, most: float) -> float:
        """Seconds of tracing; if not measured, of other structures, up to `most` * TRACE: LTX-AV's 13 s tell little of Flux."""
        return self.trace or min(record_of(_any_structure()).trace or TRACE, most * TRACE)


def record_of(structure: str) -> Record:
    record = _records.pop(structure) if structure in _records else Record.recalled(structure)
    _records[structure] = record  # newest last
    if len(_records) > MOST_RECORDS:
        _records.pop(next(iter(_records)), None)
    return record


def find_record(structure: object) -> Record | None:
    """The record, if this session has it, of the structure that a page names."""
    return _records.get(structure) if isinstance(structure, str) else None


@functools.cache
def _any_structure() -> str:
    """The name of the record whose `trace` is a mean over all structures on this machine."""
    return short_name("any", ((),))


_records: dict[str, Record] = {}
