"""Hold the state of one call of a model: whether blocks wait for compiled code, what may be traced, what has run."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# A logical clock, which numbers moments in their order. Real clocks cannot: that of Windows advances every 16 ms.
next_moment = itertools.count(1).__next__


@dataclass
class ModelCall:
    """The state of one call of a model, shared by the model's blocks."""

    synchronous: bool = True  # blocks wait for compiled code; else they run uncompiled until the worker has loaded the code
    poll: Callable[[], None] = lambda: None  # called while the call waits; may raise (the host's interrupt)
    ran: bool = False  # a block was called; in a replay of a CUDA graph none is
    uncompiled: bool = False  # a block that may be compiled ran uncompiled: its code is not ready, or memory was short
    ran_code: bool = False  # a block ran compiled
    puts_off: bool = False  # no trace may begin, as tracing would not pay off yet; blocks that have code run compiled
    waits: bool = False  # no block runs compiled: that would not pay off yet, or the compiler is not imported (`WaitsFor`)
    trace_seconds: float = math.inf  # time limit of tracing: after that no trace begins, unless the call is synchronous
    traced: float = 0.0  # seconds spent tracing blocks
    lowered: float = 0.0  # seconds of `traced` spent lowering graphs
    put_off: bool = False  # a block ran uncompiled because no trace was allowed to begin
    settings_changed: bool | None = None  # another pack changed PyTorch's settings (compile/session.py); None: not checked
    effort: Any = None  # which kinds of blocks are worth a graph (`blocks.convolutions.Effort`); None: all
    packings: set[Any] = field(default_factory=set)  # each `BlockCode` that unpacked weights (host/weights/unpacking.py)
    # Called when the model has run: a worker that started earlier would make traces of other blocks five times as slow.
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
        """Hold `lock`; call `poll` while waiting, as another thread may hold the lock for seconds."""
        while not lock.acquire(timeout=0.1):
            self.poll()
        try:
            yield
        finally:
            lock.release()
