"""Say in the user's words why something had to be compiled while sampling, and what would have avoided it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

from torch import nn

from ..compile.stats import CompileStats
from ..log import logger
from ..per_model import PerModel
from ..settings import CompileSettings
from .call_info import CallInfo
from .explain import cause
from .words import say

NOTICES_KEPT = 20


@dataclass
class Watch:
    """What a model has been compiled for, and what compiled during real work.

    Args:
        compiled_for: calls that a warmup made or that compiled in other runs, by `CompileSettings.settings_key`.
        warmed: a warmup node has run the model.
        outside_warmup: the last calls that compiled in other runs, each with its sentence, oldest first; `note_warming` drops
            those that a warmup has made since.
    """

    compiled_for: dict[tuple, list[CallInfo]] = field(default_factory=dict)
    warmed: bool = False
    outside_warmup: list[tuple[CallInfo, str]] = field(default_factory=list)
    _stats: dict[tuple, CompileStats] = field(default_factory=dict)

    def added(self, settings: tuple, now: CompileStats) -> CompileStats:
        """What has been compiled under these settings since the last time."""
        before = self._stats.get(settings, CompileStats())
        self._stats[settings] = now
        return now - before

    def note_warming(self, info: CallInfo, settings: tuple) -> None:
        """A warmup made this call."""
        self.warmed = True
        self.outside_warmup = [(other, sentence) for other, sentence in self.outside_warmup if other != info]
        self._add(info, settings)

    def notice(self, info: CallInfo, added: CompileStats, settings: tuple, dynamic: str) -> tuple[str, str | None] | None:
        """A sentence, and a size that the warmup lacks, if a call compiled what a warmup could have compiled.

        Args:
            settings: key of the settings of Torch Compile Model.
            dynamic: the input of that name.
        """
        calls, size = self.compiled_for.get(settings), None
        self._add(info, settings)
        if not added.graphs:
            return None
        if calls:
            nearest = min(calls, key=lambda call: sum(a != b for a, b in zip(astuple(call), astuple(info), strict=True)))
            guard = added.recompiles[-1].guard if added.recompiles else ""
            why, size = cause(nearest, info, dynamic, self.warmed, guard)
        else:
            why = say("firstRun") if len(self.compiled_for) == 1 else say("firstSettings")
        sentence = say("while1" if added.graphs == 1 else "while", added.graphs, f"{added.seconds:.1f}", why)
        self.outside_warmup = [*self.outside_warmup, (info, sentence)][-NOTICES_KEPT:]
        return sentence, size

    @property
    def notices(self) -> list[str]:
        """The sentences."""
        return [sentence for _info, sentence in self.outside_warmup]

    def _add(self, info: CallInfo, settings: tuple) -> None:
        calls = self.compiled_for.get(settings, [])
        if info not in calls:
            self.compiled_for[settings] = [*calls, info]


_state = threading.local()
# The page's: called with the model's name, the sentence, and the size that extra_sizes lacks.
listeners: list[Callable[[str, str, str | None], None]] = []
watch_of = PerModel(lambda _model: Watch())


@contextmanager
def warming() -> Iterator[None]:
    """While it lasts, this thread compiles beforehand."""
    _state.warming = True
    try:
        yield
    finally:
        _state.warming = False


def is_warming() -> bool:
    """Whether this thread runs a warmup."""
    return getattr(_state, "warming", False)


def report_compilation(model: nn.Module, name: str, info: CallInfo, added: CompileStats, settings: CompileSettings) -> None:
    """Called after a call of a model that compiled, or is part of a warmup; tells the log and the page what a warmup lacks."""
    if is_warming():
        watch_of(model).note_warming(info, settings.settings_key())
        return
    notice = watch_of(model).notice(info, added, settings.settings_key(), settings.dynamic)
    if notice is not None:
        logger.warning("%s: %s", name, notice[0])
        for listener in listeners:
            listener(name, *notice)
