"""What the first compilation of a process needs, done while nobody asks for anything, or while a model loads for somebody who
will wait for it.

Importing inductor and hashing PyTorch's and Triton's sources for the keys of the disk cache takes seconds. A thread that
compiles behind images (`background/thread.py`) does it there: beside a model that loads, both would take twice as long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .disk import current
from .workers import start_workers

logger = logging.getLogger("torch-compile-kit")
PATIENCE = 300.0


class _Preparation:
    thread: threading.Thread | None = None


def prepare(on_gpu: bool, first: Callable[[], None] = lambda: None) -> None:
    """Start once a process; returns at once.

    Args:
        on_gpu: the model runs on a CUDA device.
        first: a step of the caller's, before the others.
    """
    if _Preparation.thread is None:
        _Preparation.thread = threading.Thread(target=_run, args=(on_gpu, first), name="torch-compile-kit prepare", daemon=True)
        _Preparation.thread.start()


def wait_until_prepared(poll: Callable[[], None] = lambda: None) -> float:
    """Called before inductor is used, and before any lock is taken for it: two threads at the same imports are slower than one.

    Args:
        poll: called ten times a second; may raise to stop waiting.

    Returns:
        Seconds waited.
    """
    began = time.perf_counter()
    thread = _Preparation.thread
    while thread is not None and thread.is_alive() and time.perf_counter() - began < PATIENCE:
        poll()
        thread.join(0.1)
    return time.perf_counter() - began


def _run(on_gpu: bool, first: Callable[[], None]) -> None:
    cache = current()
    restarted = cache is not None and cache.has_current()  # then most graphs are read
    steps = [first, _import_inductor, _compute_keys]
    if on_gpu:
        steps.append(_start_triton)
        if not restarted:
            steps.insert(0, start_workers)  # they start while this process imports
    for step in [*steps, _trim]:
        _timed(step)


def _timed(step: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        step()
    except Exception as error:  # the compilation does it again, and tells what is wrong
        logger.debug("%s: %s", step.__name__, error)
    logger.debug("%s: %.2f s", step.__name__.strip("_"), time.perf_counter() - began)


def _import_inductor() -> None:
    import torch._dynamo.backends.inductor
    import torch._functorch._aot_autograd.autograd_cache
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics  # noqa: F401


def _start_triton() -> None:
    """Triton builds a library of its own when it is first used on a machine (triton/backends/nvidia/driver.py)."""
    from torch.utils._triton import triton_backend

    triton_backend()


def _compute_keys() -> None:
    """PyTorch keeps both for the process (functools.cache)."""
    from torch._inductor.codecache import CacheBase, torch_key

    torch_key()
    CacheBase.get_system()


def _trim() -> None:
    cache = current()
    if cache is not None:
        cache.trim()
