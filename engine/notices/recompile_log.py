"""Say in the user's words why something had to be compiled while sampling, and what would have avoided it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from ..compile.stats import CompileStats
from ..per_model import PerModel
from ..settings import CompileSettings
from .call_info import CallInfo
from .explain import cause, missing_size
from .words import say

logger = logging.getLogger("torch-compile-kit")
NOTICES_KEPT = 20


@dataclass
class Watch:
    """What a model has been compiled for.

    Args:
        known: what warmups ran, and other runs compiled, by the settings of Torch Compile Model.
        warmed: a warmup node has run it.
        told: the last sentences that a run gave rise to, and for what, oldest first; those that a warmup has solved are gone.
    """

    known: dict[tuple, list[CallInfo]] = field(default_factory=dict)
    warmed: bool = False
    told: list[tuple[CallInfo, str]] = field(default_factory=list)
    _stats: dict[tuple, CompileStats] = field(default_factory=dict)

    def added(self, settings: tuple, now: CompileStats) -> CompileStats:
        """What has been compiled under these settings since the last time."""
        before = self._stats.get(settings, CompileStats())
        self._stats[settings] = now
        return now - before

    def note_warming(self, info: CallInfo, settings: tuple) -> None:
        """A warmup ran this."""
        self.warmed = True
        self.told = [(other, sentence) for other, sentence in self.told if other != info]
        self._know(info, settings)

    def notice(self, info: CallInfo, added: CompileStats, settings: tuple, dynamic: str) -> tuple[str, str | None] | None:
        """A sentence, and a size that the warmup lacks, when a run compiled something that a warmup could have done.

        Args:
            settings, dynamic: of Torch Compile Model, and the input of that name.
        """
        told, size, parts = None, None, info.parts()
        if added.graphs:
            if not self.known:
                why = say("firstRun")
            elif not self.known.get(settings):
                why = say("firstSettings")
            else:
                guard = added.recompiles[-1].guard if added.recompiles else ""
                known = self.known[settings]
                nearest = min(known, key=lambda one: sum(a != b for a, b in zip(one.parts(), parts, strict=True)))
                why = cause(nearest, info, dynamic, self.warmed, guard)
                size = missing_size(nearest, info) if self.warmed else None
            sentence = say("while1" if added.graphs == 1 else "while", added.graphs, f"{added.seconds:.1f}", why)
            self.told = [*self.told, (info, sentence)][-NOTICES_KEPT:]
            told = sentence, size
        self._know(info, settings)
        return told

    @property
    def notices(self) -> list[str]:
        """The sentences."""
        return [sentence for _info, sentence in self.told]

    def _know(self, info: CallInfo, settings: tuple) -> None:
        known = self.known.setdefault(settings, [])
        if info not in known:
            known.append(info)


_state = threading.local()
# Who wants to know besides the log: the page.
listeners: list[Callable[[str, str, str | None], None]] = []


# What a model has been compiled for.
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
    """Called after a call of a model that compiled, or is part of a warmup; tells the log and the page of surprises."""
    if is_warming():
        watch_of(model).note_warming(info, settings.settings_key())
        return
    told = watch_of(model).notice(info, added, settings.settings_key(), settings.dynamic)
    if told is not None:
        logger.warning("%s: %s", name, told[0])
        for listener in listeners:
            listener(name, *told)
