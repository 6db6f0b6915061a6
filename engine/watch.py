"""Say in the user's words why something had to be compiled while sampling, and what would have avoided it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from .monitor import CompileStats

logger = logging.getLogger("torch-compile-kit")


@dataclass(frozen=True)
class Asked:
    """What one call of a model was asked for, in the units of the nodes.

    Args:
        width, height: pixels; 0 where the model has none.
        length: frames.
        batch: images the model saw at once; cfg above 1 doubles it.
        tokens: length of the prompt.
        patches: names of the patches in the model.
    """

    width: int = 0
    height: int = 0
    length: int = 1
    batch: int = 1
    tokens: int = 0
    patches: tuple[str, ...] = ()

    def size(self) -> str:
        frames = f"x{self.length}" if self.length > 1 else ""
        return f"{self.width}x{self.height}{frames}" if self.width else "the latent's size"


@dataclass
class Watch:
    """What a model has been compiled for."""

    known: list[Asked] = field(default_factory=list)
    warmed: bool = False
    _stats: dict[tuple, CompileStats] = field(default_factory=dict)

    def added(self, settings: tuple, now: CompileStats) -> CompileStats:
        """What has been compiled under these settings since the last time."""
        before = self._stats.get(settings, CompileStats())
        self._stats[settings] = now
        return now - before

    def notice(self, asked: Asked, added: CompileStats, warming: bool) -> str | None:
        """A sentence when a run compiled something that a warmup could have done; None in the warmup itself."""
        sentence = None
        if added.graphs and not warming:
            cost = f"{added.graphs} graph{'s' * (added.graphs != 1)} compiled while sampling ({added.seconds:.1f} s)"
            if self.warmed or self.known:
                sentence = f"{cost}: {self._cause(asked, added)}"
            else:
                sentence = f"{cost}: the first run. Torch Compile Warmup does this beforehand."
        self.warmed = self.warmed or warming
        if asked not in self.known:
            self.known.append(asked)
        return sentence

    def _cause(self, asked: Asked, added: CompileStats) -> str:
        nearest = min(self.known, key=lambda k: sum(getattr(k, n) != getattr(asked, n) for n in asked.__dataclass_fields__))
        before, now = nearest, asked
        if before.patches != now.patches:
            new = [p for p in now.patches if p not in before.patches]
            what = f"the patches of the model changed ({', '.join(new) or 'one was removed'})"
            return f"{what}. Put Torch Compile Warmup behind the node that patches."
        changes = [
            f"{name} changed from {getattr(before, name)} to {getattr(now, name)}"
            for name in ("width", "height", "length")
            if getattr(before, name) != getattr(now, name)
        ]
        if changes:
            return f"{', '.join(changes)}. Add {now.size()} to extra_sizes, or set dynamic to true."
        if before.batch != now.batch:
            return (
                f"the batch changed from {before.batch} to {now.batch}. Add a line such as {now.size()} batch {now.batch} to "
                "extra_sizes, and give the warmup the sampler's cfg (above 1 the model sees prompt and negative at once)."
            )
        if before.tokens != now.tokens:
            return (
                f"the prompt's length changed from {before.tokens} to {now.tokens} tokens. Set dynamic to true, or connect the "
                "longest prompt to the warmup."
            )
        guard = added.recompiles[-1].guard if added.recompiles else "PyTorch gives no reason"
        return f"something else changed that PyTorch's code depends on. Details: {guard}"


_watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
_state = threading.local()
# Who wants to know besides the log: the page.
listeners: list[Callable[[str, str], None]] = []


def watch_of(model: nn.Module) -> Watch:
    """What `model` has been compiled for."""
    watch = _watches.get(model)
    if watch is None:
        watch = _watches[model] = Watch()
    return watch


@contextmanager
def warming() -> Iterator[None]:
    """While it lasts, compiling on this thread is what the user asked for."""
    _state.warming = True
    try:
        yield
    finally:
        _state.warming = False


def report_compilation(model: nn.Module, name: str, asked: Asked, added: CompileStats) -> None:
    """Called after each call of a model; tells the log and the page when it compiled outside a warmup."""
    sentence = watch_of(model).notice(asked, added, getattr(_state, "warming", False))
    if sentence:
        logger.warning("%s: %s", name, sentence)
        for listener in listeners:
            listener(name, sentence)
