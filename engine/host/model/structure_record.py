"""Keep what is known of all models of one structure: in memory, and on disk beside their code."""

import functools
import json
import math
from contextlib import suppress
from dataclasses import dataclass

from ...cache.code_store import current
from ...cache.structure import short_name

# Seconds that tracing takes where it was not measured.
TRACE = 2.0
# Structures that are kept in memory.
MOST_RECORDS = 32
# Choices in the store: that a structure was compiled, and numbers of its record.
CHOICE, DECIDED, NUMBERS = "compiled", "yes", "payback"


@dataclass
class Record:
    """What is known of all models of one structure.

    Args:
        seconds: that calls of the sampler took uncompiled, in `runs` runs.
        share: of a step that compiled code was seen to save; 0: not measured.
        trace: seconds that tracing took in the last session that traced; 0: none has.
        sessions: before this one, with `session_runs` runs, compiled or not.
        is_kept: an earlier session has compiled it.
        is_decided: it is compiled in this session.
        runs_now, traced: runs and seconds of tracing in this session.
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
    runs_now: int = 0
    traced: float = 0.0

    @classmethod
    def recalled(cls, structure: str) -> "Record":
        store = current()
        choices = store.choices(structure) if store is not None else {}
        record = cls(structure, is_kept=choices.get(CHOICE) == DECIDED)
        with suppress(ValueError, TypeError, OverflowError, RecursionError):
            numbers = [float(number) for number in json.loads(choices.get(NUMBERS, ""))]
            if len(numbers) == 6 and all(0 <= number < math.inf for number in numbers):
                record.seconds, record.runs, record.share, record.trace, record.sessions, record.session_runs = numbers
        return record

    def keep(self) -> None:
        if (store := current()) is not None:
            sessions = self.sessions + 1, self.session_runs + self.runs_now
            numbers = json.dumps([self.seconds, self.runs, self.share, self.trace, *sessions])
            store.add_choices(self.structure, {NUMBERS: numbers, **({CHOICE: DECIDED} if self.is_decided else {})})

    def decide(self) -> None:
        self.is_decided = True
        self.keep()

    def add_trace(self, seconds: float) -> None:
        if not self.traced:  # half way, as a structure may be an exception: LTX-AV traces for 12 s
            others = record_of(_any_structure())
            others.trace = math.sqrt(seconds * (others.trace or TRACE))
            others.keep()
        self.traced += seconds
        self.trace = self.traced

    def expected_trace(self) -> float:
        return self.trace or record_of(_any_structure()).trace or TRACE


def record_of(structure: str) -> Record:
    record = _records.pop(structure) if structure in _records else Record.recalled(structure)
    _records[structure] = record  # newest last
    if len(_records) > MOST_RECORDS:
        _records.pop(next(iter(_records)), None)
    return record


def find_record(structure: object) -> Record | None:
    """The record of a structure of this session, by what a page sends."""
    return _records.get(structure) if isinstance(structure, str) else None


@functools.cache
def _any_structure() -> str:
    """The name of the record whose `trace` is what structures took on this machine."""
    return short_name("any", ((),))


_records: dict[str, Record] = {}
