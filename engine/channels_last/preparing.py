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
    """The module `kernels.py`; None if Triton is missing or broken."""
    try:
        from . import kernels
    except Exception as error:
        if not isinstance(error, ImportError):
            logger.warning("convolutions keep ComfyUI's layout: Triton is broken (%s)", in_one_line(error))
        return None
    return kernels


MOST_TRIES = 3


class _NormKernels:
    """Triton compiles a kernel at its first launch: `prepare` launches all kernels on the worker, where no call waits."""

    def __init__(self) -> None:
        self.ready = False
        self._job: Job | None = None
        self._tries = 0

    def prepare(self, device: torch.device) -> None:
        tried = self._job is not None and (not self._job.over or self._tries == MOST_TRIES)
        if tried or self.ready or is_capturing(device):
            return
        self._tries += 1
        self._job = Job(weakref.ref(self), functools.partial(self._make, device), device)
        compiler.submit(self._job)

    def _make(self, device: torch.device) -> None:
        with yielding():  # takes seconds, so without the GPU's lock: other threads may capture
            if kernels() is None:  # asked on the worker, as `kernels` imports Triton
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
