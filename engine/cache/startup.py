"""Import inductor and start its compile workers before the first compilation of a process.

Importing inductor and hashing PyTorch's and Triton's sources for the keys of the disk cache takes seconds, and so do workers,
without which PyTorch compiles one Triton kernel after the other in this process. A thread does both while the server is idle,
or while a model loads for somebody who will wait for the code.
"""

import threading
import time
from collections.abc import Callable

from ..log import logger
from ..threads import started
from ..torch_compat import private

LONGEST_WAIT = 300.0
_thread: threading.Thread | None = None
_begun: set[Callable] = set()
_since = 0.0


def prepare(*steps: Callable[[], object]) -> None:
    """Run those steps on a thread that have not begun in this process, behind those of earlier calls."""
    global _thread, _since
    new = [step for step in steps if step not in _begun]
    if new:
        # The exit waits for it: a thread inside PyTorch would abort the process.
        thread = threading.Thread(target=_run, args=(new, _thread), name="torch-compile-kit prepare")
        if started(thread):
            _begun.update(new)
            _thread, _since = thread, time.monotonic()


def is_preparing() -> bool:
    """Whether to trace would be slow now, and would slow what prepares: both are Python. One that hangs counts no more."""
    return _thread is not None and _thread.is_alive() and time.monotonic() - _since < LONGEST_WAIT


def wait_until_prepared(poll: Callable[[], None] = lambda: None) -> float:
    """Wait before inductor is used, and before any lock is taken for it: two threads at the same imports are slower than one.

    Returns the seconds waited. `poll` is called ten times a second and may raise to stop waiting.
    """
    began, thread = time.perf_counter(), _thread
    while thread is not None and thread.is_alive() and time.perf_counter() - began < LONGEST_WAIT:
        poll()
        thread.join(0.1)
    return time.perf_counter() - began


def _run(steps: list[Callable[[], object]], after: threading.Thread | None) -> None:
    if after is not None:
        after.join(LONGEST_WAIT)
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
