"""Carry what holds for one call of a model."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Numbers moments in their order. Clocks do not tell which came first: that of Windows stands still for 16 ms.
next_moment = itertools.count(1).__next__


@dataclass
class ModelCall:
    """One call of a model, for all its blocks."""

    synchronous: bool = True  # wait for compiled code; else blocks run uncompiled until a worker thread has it
    poll: Callable[[], None] = lambda: None  # called while the call waits; may raise (the host's interrupt)
    ran: bool = False  # blocks have run; in a replay of a CUDA graph none do
    uncompiled: bool = False  # a block ran without compiled code, since there was none yet
    ran_code: bool = False  # a block ran compiled
    puts_off: bool = False  # no trace begins, as it would not pay yet; what has code runs it
    waits: bool = False  # no block is compiled: that would not pay yet, or the compiler is not imported (`WaitsFor`)
    trace_seconds: float = math.inf  # for how long blocks may be traced; then no trace begins, unless the call is synchronous
    traced: float = 0.0  # seconds for which blocks have been traced
    lowered: float = 0.0  # for how much of that time graphs were lowered
    put_off: bool = False  # a block ran uncompiled because no trace was allowed to begin
    settings_changed: bool | None = None  # of PyTorch's, by another pack (compile/session.py); None: not known yet
    effort: Any = None  # which kinds of blocks are worth a graph (`blocks.convolutions.Effort`); None: all
    packings: set[Any] = field(default_factory=set)  # the `BlockCode` of each kind of weights that were unpacked
    # Called when the model has run: a worker that starts in the middle would slow the traces of other blocks five times.
    when_over: list[Callable[[], object]] = field(default_factory=list)
    began: int = field(default_factory=next_moment)

    @property
    def may_trace(self) -> bool:
        return self.synchronous or (not self.puts_off and self.traced <= self.trace_seconds)

    def over(self) -> None:
        while self.when_over:
            self.when_over.pop(0)()

    @contextmanager
    def holding(self, lock: Any) -> Iterator[None]:
        """Hold a lock that another thread may hold for seconds."""
        while not lock.acquire(timeout=0.1):
            self.poll()
        try:
            yield
        finally:
            lock.release()
