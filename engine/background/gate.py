"""When the thread that compiles may run: not beside work that needs Python's lock.

A thread that computes in Python keeps the lock from another that gives it away at every call, as loading weights, LoRA, VAE and
launching kernels do: what takes a second takes five beside it. While the host is idle, stands in a call that is not Python's
(waits for the GPU, a disk, a lock), or a model is replayed from CUDA graphs, nobody needs the lock. PyTorch's compiler cannot
be told to wait, so its busiest functions ask here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..torch_compat import private
from ..torch_settings import SharedScope

# Share of the waiting time that the worker may run beside the host. A smaller share slows each step less, for longer: all that
# is lost either way is some seconds (measured: 45 s until the code is there at 0.15, 21 s at 0.5).
DUTY_CYCLE = 0.5
# Seconds that a job waits at the most; from then on it runs without waiting.
CEILING = 20.0
# Seconds between two looks at the host's thread; a frame that has not moved for BLOCKED_AFTER waits for the GPU.
POLL_SECONDS, BLOCKED_AFTER = 0.003, 0.005
# Seconds at the most that are held against the worker: between two calls it may also have been idle, or waited for a compiler.
MAX_DEBT = 0.05
# Functions that compiling goes through all the time.
_BUSIEST = "dispatch_of_fake_tensors", "run_node", "can_fuse", "codegen_node_schedule"


class Stopped(BaseException):
    """Raised on the worker when the process ends."""


class Gate:
    """Open while nothing else needs Python.

    `is_busy` is the host's: whether it executes a prompt; without a server it never does.

    Args:
        waited: seconds so far.
    """

    def __init__(self) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self.waited = 0.0
        self._open = threading.Event()
        self._host: int | None = None
        self._place: tuple[int, int] | None = None
        self._since = 0.0
        self._asked: float | None = None
        self._credit = 0.0
        self._tracing = 0
        self._held_until = 0.0
        self._stopped = False
        self._waited_before_job = 0.0

    def begin_job(self) -> None:
        """The ceiling counts from here."""
        self._waited_before_job = self.waited

    def stop(self) -> None:
        """The process ends: the worker gets `Stopped` the next time it asks."""
        self._stopped = True
        self._open.set()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While it lasts, a call traces, which is Python alone, and the worker waits without a share."""
        self._tracing += 1
        try:
            yield
        finally:
            self._tracing -= 1

    def hold(self, seconds: float) -> None:
        """For so long the worker waits without a share: a model is about to be captured, and then needs no Python."""
        self._held_until = time.monotonic() + seconds

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open while it lasts; then as before."""
        was_open = self._open.is_set()
        self._open.set()
        try:
            yield
        finally:
            if not was_open:
                self._open.clear()

    def open(self) -> None:
        """From now on nobody needs Python much."""
        self._held_until = 0.0
        self._open.set()

    def close(self) -> None:
        """From now on the calling thread, which samples, may."""
        self._host = threading.get_ident()
        self._open.clear()

    def wait(self) -> None:
        """On the thread that compiles: until nobody needs Python, or its share is due."""
        if self._stopped:
            raise Stopped
        while self._is_held() and not self._stopped and self.waited - self._waited_before_job < CEILING:
            if self._host_stands(time.monotonic()):  # it may wait for something that this thread holds
                break
            time.sleep(POLL_SECONDS)
            self.waited += POLL_SECONDS
        now = time.monotonic()
        if self._asked is not None:
            self._credit = max(self._credit - (now - self._asked), -MAX_DEBT)
        self._asked = None
        if self._is_free(now) or self.waited - self._waited_before_job > CEILING:
            return
        while self._credit <= 0:
            self._open.wait(POLL_SECONDS)
            then = time.monotonic()
            self.waited += then - now
            self._credit += DUTY_CYCLE * (then - now)
            now = then
            if self._is_free(now):
                return
        self._asked = now

    def _is_held(self) -> bool:
        return self._tracing > 0 or (self._held_until > time.monotonic() and not self._open.is_set() and self.is_busy())

    def _is_free(self, now: float) -> bool:
        return self._open.is_set() or not self.is_busy() or self._host_stands(now)

    def _host_stands(self, now: float) -> bool:
        frame = sys._current_frames().get(self._host or 0)
        if frame is None:
            return True
        place = id(frame), frame.f_lasti
        if place != self._place:
            self._place, self._since = place, now
        return now - self._since > BLOCKED_AFTER


gate = Gate()
_waiters: set[int] = set()


def _waits() -> None:
    if threading.get_ident() in _waiters:
        gate.wait()


def _asking(found: Callable) -> Callable:
    def asks(*args: object, **kwargs: object) -> object:
        _waits()
        return found(*args, **kwargs)

    return asks


_scope = SharedScope({name: private.switch(name, late=True) for name in _BUSIEST})


@contextmanager
def waiting_at_gate() -> Iterator[None]:
    """While it lasts, this thread waits where the gate is closed."""
    gate.begin_job()
    _waiters.add(threading.get_ident())
    try:
        with _scope.wrapping(**dict.fromkeys(_BUSIEST, _asking)):
            yield
    finally:
        _waiters.discard(threading.get_ident())
