"""How long inductor measures a new kernel's variants (block sizes) when it first runs.

PyTorch runs each variant for up to 25 ms, and flushes the card's cache a hundred times before and once for each run
(torch/_inductor/runtime/benchmarking.py). The least of twenty runs tells the same variants apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..torch_settings import SharedScope, late_method

# Runs, and milliseconds that they may take; kernels that take longer are measured by PyTorch's five first ones.
BRIEF = {"memory_warmup_iters": 5, "benchmark_iters": 20, "max_benchmark_duration": 4}


_read, _write = late_method("torch._inductor.runtime.benchmarking", "InductorBenchmarker", "benchmark_gpu")
# How kernels are measured; entered only where inductor is in use.
tuning_scope = SharedScope({"benchmark": (_read, _write)})


def brief_benchmark() -> Callable | None:
    """PyTorch's way to measure a kernel, with fewer runs where the caller leaves their number open."""
    found = _read()
    if found is None or hasattr(found, "_is_brief"):
        return found

    @functools.wraps(found)
    def benchmark_gpu(self, kernel: Callable, **kwargs: object) -> object:
        return found(self, kernel, **{**BRIEF, **kwargs})

    benchmark_gpu.__dict__["_is_brief"] = True
    return benchmark_gpu
