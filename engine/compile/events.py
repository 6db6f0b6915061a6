"""Notice compilations as they happen, and who caused them.

PyTorch calls back on the thread that compiles (torch/_dynamo/callback.py). A call into compiled code puts itself on this
thread's stack; a compilation that starts then belongs to it. In the steady state that costs one list append per call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..torch_compat import private
from .session import CompileSession

logger = logging.getLogger("torch-compile-kit")


class _Monitor(threading.local):
    """The calls in progress on this thread, innermost last, and how often one of them compiled.

    `listener` is called with the block's class name when a compilation begins, and with None when it ends.
    """

    def __init__(self) -> None:
        self.calls: list[CompileSession] = []
        self.compilations = 0
        self.listener: Callable[[str | None], None] | None = None


monitor = _Monitor()


def _is_compilation(args: object) -> bool:
    """PyTorch also calls back when it measures the variants of a kernel or records a CUDA graph (from 2.8 on)."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "DYNAMO")
    return trigger in ("DYNAMO", "LAZY_BACKWARD")


def _on_compile_start(args: object = None) -> None:
    if monitor.calls and _is_compilation(args):
        monitor.compilations += 1
        with _told("a compilation is not watched"):
            monitor.calls[-1].start()
        with _told("a compilation was not told"):
            if monitor.listener is not None:
                monitor.listener(monitor.calls[-1].block)


def _on_compile_end(args: object = None) -> None:
    if monitor.calls and _is_compilation(args):
        with _told("a compilation was not watched"):
            monitor.calls[-1].end()
        with _told("the end of a compilation was not told"):
            if monitor.listener is not None:
                monitor.listener(None)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """An error of ours inside PyTorch's callback would leave PyTorch counting a compilation for ever, for every pack."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)


class _Watching:
    """Keeps the two callbacks registered while any model samples, and no longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                private.callback_handler.register_start_callback(_on_compile_start)
                private.callback_handler.register_end_callback(_on_compile_end)

    def renew(self) -> None:
        """torch._dynamo.reset() forgets the callbacks, whoever calls it."""
        with self._lock:
            if self._users and _on_compile_start not in private.callback_handler.start_callbacks:
                private.callback_handler.register_start_callback(_on_compile_start)
                private.callback_handler.register_end_callback(_on_compile_end)

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for registered, callback in (
                    (private.callback_handler.start_callbacks, _on_compile_start),
                    (private.callback_handler.end_callbacks, _on_compile_end),
                ):
                    if callback in registered:  # a reset has forgotten them
                        registered.remove(callback)


watching = _Watching()
