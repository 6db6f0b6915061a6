"""When the thread that compiles may run: not beside work that needs Python's lock.

A thread that computes in Python keeps the lock from another that gives it away at every call, as loading weights, LoRA and VAE
do: what takes a second takes five beside it. While the host is idle, or a model is replayed from CUDA graphs, nobody needs the
lock. PyTorch's compiler cannot be told to wait, so its busiest functions ask here.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..torch_settings import SharedScope, late_method

# Seconds: somebody else may wait for a lock that the waiting thread holds (another pack's torch.compile), so it goes on then.
PATIENCE = 10.0
# Modules and functions that compiling goes through all the time.
_BUSIEST = (
    ("torch._subclasses.fake_tensor", "FakeTensorMode", "__torch_dispatch__"),
    ("torch._inductor.graph", "GraphLowering", "run_node"),
    ("torch._inductor.scheduler", "Scheduler", "can_fuse"),
    ("torch._inductor.codegen.simd", "SIMDScheduling", "codegen_node_schedule"),
)


class Gate:
    """Open while nothing else needs Python.

    `is_busy` is the host's: whether it executes a prompt; without a server it never does.

    Args:
        waited: seconds so far.
    """

    def __init__(self) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self._open = threading.Event()
        self._goes_on_until = 0.0
        self.waited = 0.0

    def open(self) -> None:
        """From now on nobody needs Python much."""
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def wait(self) -> None:
        """On the thread that compiles: until the gate is open or the host idle."""
        if self._open.is_set() or not self.is_busy() or time.monotonic() < self._goes_on_until:
            return
        began = time.monotonic()
        while self.is_busy() and not self._open.wait(0.02):
            if time.monotonic() > began + PATIENCE:
                self._goes_on_until = time.monotonic() + PATIENCE
                break
        self.waited += time.monotonic() - began


gate = Gate()
_waiters: set[int] = set()


def _waits() -> None:
    if threading.get_ident() in _waiters:
        gate.wait()


class _Imports:
    """A finder that finds nothing: asked for each module that is imported."""

    @staticmethod
    def find_spec(*_: object) -> None:
        _waits()


def _asking(found: Callable) -> Callable:
    def asks(*args: object, **kwargs: object) -> object:
        _waits()
        return found(*args, **kwargs)

    return asks


_methods = {".".join(where): late_method(*where) for where in _BUSIEST}
_scope = SharedScope(_methods)


@contextmanager
def waiting_at_gate(first: str | None) -> Iterator[None]:
    """While it lasts, this thread waits where the gate is closed.

    Args:
        first: a module to import, slowly, before the rest.
    """
    _waiters.add(threading.get_ident())
    sys.meta_path.insert(0, _Imports)
    try:
        with ExitStack() as scopes:
            if first is not None:
                importlib.import_module(first)
            found = {name: read() for name, (read, _write) in _methods.items()}
            scopes.enter_context(_scope.applied(**{name: _asking(method) for name, method in found.items() if method}))
            yield
    finally:
        sys.meta_path.remove(_Imports)
        _waiters.discard(threading.get_ident())
