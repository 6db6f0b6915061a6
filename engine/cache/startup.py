"""Import inductor and start its compile workers before the first compilation of a process.

Importing inductor and hashing PyTorch's and Triton's sources for the keys of the disk cache takes seconds, and so do workers,
without which PyTorch compiles one Triton kernel after the other in this process. A thread does both while the server is idle,
or while a model loads for somebody who will wait for the code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..log import logger
from ..threads import started
from ..torch_compat import private
from .disk import current

LONGEST_WAIT = 300.0
_thread: threading.Thread | None = None


def prepare(on_gpu: bool, first: Callable[[], None] = lambda: None) -> None:
    """Start the thread, once a process; `first` is a step of the caller before those of this module."""
    global _thread
    if _thread is None:
        steps = [*([start_workers] if on_gpu else []), first, import_inductor, trim_cache]
        thread = threading.Thread(target=_run, args=(steps,), name="torch-compile-kit prepare", daemon=True)
        _thread = thread if started(thread) else None


def wait_until_prepared(poll: Callable[[], None] = lambda: None) -> float:
    """Wait before inductor is used, and before any lock is taken for it: two threads at the same imports are slower than one.

    Returns the seconds waited. `poll` is called ten times a second and may raise to stop waiting.
    """
    began, thread = time.perf_counter(), _thread
    while thread is not None and thread.is_alive() and time.perf_counter() - began < LONGEST_WAIT:
        poll()
        thread.join(0.1)
    return time.perf_counter() - began


def _run(steps: list[Callable[[], object]]) -> None:
    for step in steps:
        began = time.perf_counter()
        try:
            step()
        except Exception as error:  # the compilation does the same, and tells what is wrong
            logger.debug("%s: %s", step.__name__, error)
        logger.debug("%s: %.2f s", step.__name__, time.perf_counter() - began)


def start_workers() -> None:
    private.maybe_warm_pool()  # does nothing where PyTorch uses no processes (one core, no Triton)


def import_inductor() -> None:
    for module in ("inductor_backend", "autograd_cache", "compile_fx", "triton_heuristics"):
        getattr(private, module)
    private.torch_key()  # kept for the process (functools.cache), as is the next
    private.get_system()


def trim_cache() -> None:
    cache = current()
    if cache is not None:
        cache.trim()
