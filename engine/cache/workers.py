"""The processes in which inductor compiles Triton kernels.

PyTorch starts them when the first graph is compiled and uses them once they have started; until then it compiles one kernel
after the other in its own process (torch/_inductor/async_compile.py, `use_process_pool`), which makes the first graph the
slowest. Here the first kernel that is on no disk waits for them, and who will wait for that has them started beforehand. After
a restart there may be no such kernel, and what starts a dozen processes takes the processor from the first images.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..torch_settings import SharedScope, late_method

logger = logging.getLogger("torch-compile-kit")
MODULE = "torch._inductor.async_compile"
# What a worker imports for its first kernel.
IMPORTS = (
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.runtime.static_triton_launcher",
    "triton.compiler.code_generator",
    "triton.backends.nvidia.compiler",
)
PATIENCE = 20.0
# Of the workers, those that import beforehand: a block has some ten kernels.
MOST = 12


@functools.cache
def start_workers() -> None:
    """Once a process; returns at once. Nothing happens where PyTorch would use no processes (one core, no Triton)."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads, maybe_warm_pool

    maybe_warm_pool()
    if get_compile_threads() > 1:
        AsyncCompile.use_process_pool()  # the first job makes the processes start
        for _ in range(min(get_compile_threads(), MOST)):  # while all of them are idle
            AsyncCompile.process_pool().submit(functools.partial(exec, f"import {', '.join(IMPORTS)}"))


_read, _write = late_method(MODULE, "AsyncCompile", "triton")
# How kernels are compiled: None while inductor is not in use.
kernel_scope = SharedScope({"compile": (_read, _write)})


def waiting_compile() -> Callable | None:
    """PyTorch's way to compile a kernel, after the workers have started."""
    found = _read()
    if found is None or hasattr(found, "_waits"):
        return found

    @functools.wraps(found)
    def triton(self, kernel_name: str, source_code: str, *args: object, **kwargs: object) -> object:
        module = sys.modules[MODULE]
        if module.CompiledTritonKernels.get(source_code) is None:
            _wait(module.AsyncCompile)
        elif not getattr(module.AsyncCompile, "_ready_future", None):
            with _no_processes(self):
                return found(self, kernel_name, source_code, *args, **kwargs)
        return found(self, kernel_name, source_code, *args, **kwargs)

    triton.__dict__["_waits"] = True
    return triton


@contextmanager
def _no_processes(compiler: Any) -> Iterator[None]:
    """PyTorch starts the workers before it looks whether it has the kernel; to it, here are none."""
    compiler.use_process_pool = lambda: False
    try:
        yield
    finally:
        del compiler.use_process_pool


def _wait(compiler: Any) -> None:
    began = time.perf_counter()
    try:
        start_workers()
        compiler.wait_pool_ready(PATIENCE)
    except Exception as error:  # no processes: PyTorch compiles here, as without us
        logger.debug("no worker processes: %s", error)
    if time.perf_counter() - began > 0.1:
        logger.debug("waited %.1f s for the workers", time.perf_counter() - began)
