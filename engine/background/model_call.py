"""One call of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelCall:
    """One call of a model, for all its blocks.

    Args:
        synchronous: wait for compiled code; else blocks run uncompiled until a worker thread has lowered their graphs.
        poll: called while something is waited for; may raise to stop (the host's interrupt).
        ran: blocks have run in it; in a replay of a CUDA graph none do.
        uncompiled: a block ran without compiled code, since there is none yet.
        began: by `time.monotonic`.
    """

    synchronous: bool = True
    poll: Callable[[], None] = lambda: None
    ran: bool = False
    uncompiled: bool = False
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def holding(self, lock: Any) -> Iterator[None]:
        """Hold a lock that another thread may have for seconds: `poll` is called meanwhile, ten times a second."""
        while not lock.acquire(timeout=0.1):
            self.poll()
        try:
            yield
        finally:
            lock.release()
