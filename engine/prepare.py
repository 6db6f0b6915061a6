"""What the first compilation of a process needs, done in the background while the model is still loading.

Importing inductor and hashing PyTorch's and Triton's sources for the keys of the disk cache takes seconds; on a CPU PyTorch
also starts a Python for each of the CPU's vector instruction sets, to see that it can load code for it.
"""

from __future__ import annotations

import logging
import threading
import time

from .disk_cache import current
from .vec_isa import know_instruction_sets

logger = logging.getLogger("torch-compile-kit")
PATIENCE = 300.0
INSTRUCTION_SETS = "cpu.json"


class _Preparation:
    thread: threading.Thread | None = None


def prepare(on_gpu: bool) -> None:
    """Start once a process; returns at once.

    Args:
        on_gpu: the model runs there.
    """
    if _Preparation.thread is None:
        _Preparation.thread = threading.Thread(target=_run, args=(on_gpu,), name="torch-compile-kit prepare", daemon=True)
        _Preparation.thread.start()


def wait_until_prepared() -> None:
    """Called before a compilation: two threads at the same work would be slower than one."""
    thread = _Preparation.thread
    if thread is not None and thread is not threading.current_thread():
        thread.join(PATIENCE)


def _run(on_gpu: bool) -> None:
    for step in (_import_inductor, _compute_keys, *(() if on_gpu else (_probe_cpu,)), _trim):
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
    import torch._inductor.compile_fx  # noqa: F401


def _compute_keys() -> None:
    """PyTorch keeps both for the process (functools.cache)."""
    from torch._inductor.codecache import CacheBase, torch_key

    torch_key()
    CacheBase.get_system()


def _probe_cpu() -> None:
    cache = current()
    if cache is not None:
        know_instruction_sets(cache.root / INSTRUCTION_SETS)


def _trim() -> None:
    cache = current()
    if cache is not None:
        cache.trim()
