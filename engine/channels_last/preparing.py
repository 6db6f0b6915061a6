"""Compile the Triton kernels for channels_last on the worker thread."""

import functools
import weakref
from typing import Any

import torch

from ..background.thread import Job, compiler
from ..devices import gpu_locks, is_capturing
from ..failures.describe import in_one_line
from ..log import logger
from ..threads import yielding


@functools.cache
def kernels() -> Any:
    """`kernels.py`; None without Triton, or with one that is broken."""
    try:
        from . import kernels
    except Exception as error:
        if not isinstance(error, ImportError):
            logger.warning("convolutions keep ComfyUI's layout: Triton is broken (%s)", in_one_line(error))
        return None
    return kernels


class _NormKernels:
    """Triton compiles a kernel when it first runs: `prepare` runs all of them on the worker, where no call waits."""

    def __init__(self) -> None:
        self.ready = False
        self._is_queued = False

    def prepare(self, device: torch.device) -> None:
        """Once in the life of a process: the worker itself tries a job again that lacks memory."""
        if not self._is_queued and not self.ready and not is_capturing(device):
            self._is_queued = True
            compiler.submit(Job(weakref.ref(self), functools.partial(self._make, device), device))

    def _make(self, device: torch.device) -> None:
        with yielding():  # seconds, in which other threads may capture
            if kernels() is None:  # asked here, as it imports Triton
                return
            with kernels().only_compiling():
                _run_all(torch.device("cpu"))
        with gpu_locks[device]:
            _run_all(device)
        self.ready = True


def _run_all(device: torch.device) -> None:
    module = kernels()
    for dtype in (torch.float16, torch.bfloat16):
        image = torch.zeros(1, 320, 64, 64, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
        weight = torch.zeros(320, dtype=dtype, device=device)
        factors = module.factors_of(image, 32, weight, weight, 1e-5)
        for silu in (False, True):
            module.apply_factors(image, factors, torch.empty_like(image), silu)
        module.channels_last_weight(torch.zeros(320, 320, 3, 3, dtype=dtype, device=device))


norm_kernels = _NormKernels()
