"""Let the worker thread run only while the host's thread does not need the GIL.

A thread that computes in Python keeps the GIL from a thread that releases it at every call, as loading weights, LoRA, VAE and
kernel launches do: a second of such work takes five beside the worker. PyTorch's compiler cannot be paused, so its busiest
functions call `Gate.wait`:

1. The gate is open while the host executes no prompt, and while a model is replayed from CUDA graphs (`open`). A sampling run
   closes it (`close`).
2. While it is closed, the worker runs for DUTY_CYCLE of the time that it has waited: `wait` earns credit, running spends it.
3. While a call traces (`tracing`), or a capture is near (`hold`), the worker earns nothing, unless a call waits for the worker
   (`opened`).
4. A job that has waited for CEILING seconds waits no more. When the process ends, `wait` raises `Stopped`.

The gate does not ask where the host's threads are: whoever holds a frame of another thread (`sys._current_frames`) owns its
locals when it returns, and destroys them on the wrong thread. Tensors of a CUDA graph capture end the process there.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..torch_compat import private
from ..torch_settings import SharedScope

# Share of the time it has waited that the worker may run beside the host. With a smaller share more steps are slower, each by
# less: code is ready after 45 s at 0.15, after 21 s at 0.5.
DUTY_CYCLE = 0.5
CEILING = 20.0
POLL_SECONDS = 0.003
# Credit is never below minus this: between two calls of `wait` the worker may also have been idle, or waited for a compiler.
MAX_DEBT = 0.05
_BUSIEST = "dispatch_of_fake_tensors", "run_node", "can_fuse", "codegen_node_schedule"


class Stopped(BaseException):
    """Raised on the worker when the process ends."""


class Gate:
    """See the module. `is_busy` is set by the host: whether it executes a prompt. `waited` counts seconds."""

    def __init__(self) -> None:
        self.is_busy: Callable[[], bool] = lambda: False
        self.waited = 0.0
        self.jobs_past_ceiling = 0
        self._open = threading.Event()
        self._asked: float | None = None
        self._credit = 0.0
        self._tracing = 0
        self._calls_waiting = 0
        self._held_until = 0.0
        self._stopped = False
        self._waited_before_job = 0.0
        self._is_past_ceiling = False

    def begin_job(self) -> None:
        self._waited_before_job, self._is_past_ceiling = self.waited, False

    def stop(self) -> None:
        self._stopped = True
        self._open.set()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While it lasts, a call traces, which is Python alone."""
        self._tracing += 1
        try:
            yield
        finally:
            self._tracing -= 1

    def hold(self, seconds: float) -> None:
        """A model is about to be captured, after which it needs no Python."""
        self._held_until = time.monotonic() + seconds

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While it lasts, a call waits for the worker, or for a lock of the worker's."""
        was_open = self._open.is_set()
        self._calls_waiting += 1
        self._open.set()
        try:
            yield
        finally:
            self._calls_waiting -= 1
            if not was_open:
                self._open.clear()

    def open(self) -> None:
        self._held_until = 0.0
        self._open.set()

    def close(self) -> None:
        """Called by the thread that samples."""
        self._open.clear()

    def wait(self) -> None:
        """On the worker: wait until the gate is open or there is credit."""
        if self._stopped:
            raise Stopped
        while self._is_held() and not self._stopped and not self._has_waited_enough():
            time.sleep(POLL_SECONDS)
            self.waited += POLL_SECONDS
        now = time.monotonic()
        if self._asked is not None:
            self._credit = max(self._credit - (now - self._asked), -MAX_DEBT)
        self._asked = None
        if self._is_free():
            return
        while self._credit <= 0:
            self._open.wait(POLL_SECONDS)
            then = time.monotonic()
            self.waited += then - now
            self._credit += DUTY_CYCLE * (then - now)
            now = then
            if self._is_free():
                return
        self._asked = now

    def _is_held(self) -> bool:
        if self._calls_waiting:
            return False
        return self._tracing > 0 or (self._held_until > time.monotonic() and not self._open.is_set() and self.is_busy())

    def _is_free(self) -> bool:
        return self._open.is_set() or not self.is_busy() or self._has_waited_enough()

    def _has_waited_enough(self) -> bool:
        if not self._is_past_ceiling and self.waited - self._waited_before_job >= CEILING:
            self._is_past_ceiling = True
            self.jobs_past_ceiling += 1
        return self._is_past_ceiling


gate = Gate()
_waiters: set[int] = set()


def _behind_gate(function: Callable) -> Callable:
    def wait_and_call(*args: object, **kwargs: object) -> object:
        if threading.get_ident() in _waiters:
            gate.wait()
        return function(*args, **kwargs)

    return wait_and_call


_scope = SharedScope({name: private.switch(name, late=True) for name in _BUSIEST})


@contextmanager
def waiting_at_gate() -> Iterator[None]:
    """While it lasts, the busiest functions of PyTorch's compiler call `gate.wait` on this thread."""
    gate.begin_job()
    _waiters.add(threading.get_ident())
    try:
        with _scope.wrapping(**dict.fromkeys(_BUSIEST, _behind_gate)):
            yield
    finally:
        _waiters.discard(threading.get_ident())
