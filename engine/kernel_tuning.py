"""How long inductor measures a new kernel's variants (block sizes) when it first runs.

PyTorch gives each variant some 40 ms, most of them to fill and flush the card's cache a hundred times
(torch/_inductor/runtime/benchmarking.py), which for a block of thirty variants is over a second of waiting. The least of
twenty runs tells the same variants apart.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from .scopes import SharedScope

MODULE = "torch._inductor.runtime.benchmarking"
# Runs, and milliseconds that they may take; kernels that take longer are measured by PyTorch's five first ones.
BRIEF = {"memory_warmup_iters": 5, "benchmark_iters": 20, "max_benchmark_duration": 4}


def _read() -> Callable | None:
    module = sys.modules.get(MODULE)
    return module.InductorBenchmarker.__dict__.get("benchmark_gpu") if hasattr(module, "InductorBenchmarker") else None


def _write(function: Callable | None) -> None:
    if function is not None:
        sys.modules[MODULE].InductorBenchmarker.benchmark_gpu = function


# How kernels are measured; entered only where inductor is in use.
tuning_scope = SharedScope({"benchmark": (_read, _write)}, of_process=True)


def brief_benchmark() -> Callable | None:
    """PyTorch's way to measure a kernel, with fewer runs where the caller leaves their number open."""
    found = _read()
    if found is None or hasattr(found, "_is_brief"):
        return found

    @functools.wraps(found)
    def benchmark_gpu(self, kernel: Callable, **kwargs: object) -> object:
        return found(self, kernel, **{**BRIEF, **kwargs})

    benchmark_gpu._is_brief = True
    return benchmark_gpu
