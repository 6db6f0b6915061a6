"""The Triton kernels for channels_last, and getting them ready where nobody waits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...background.model_call import CodeRequest, ModelCall
from ...background.stand_in import StandIn
from ...background.thread import compiler


@functools.cache
def kernels() -> Any:
    """`cuda_graphs/group_norm.py`; None without Triton."""
    try:
        from ...cuda_graphs import group_norm
    except ImportError:  # no Triton
        return None
    return group_norm


MOST_TRIES = 3


class _NormKernels:
    """Triton compiles the kernels for channels_last when they first run: on the thread that compiles, where nobody waits."""

    def __init__(self) -> None:
        self.ready = False
        self._asked = False
        self._tries = 0

    def ask(self, call: ModelCall, device: torch.device) -> None:
        if not self._asked and kernels() is not None and not torch.cuda.is_current_stream_capturing():
            call.requests.append(CodeRequest(self, None, StandIn(nn.Module(), (torch.empty(0, device=device),), {})))

    def prepare(self, device: torch.device) -> None:
        """Have them made for that device in the background, unless they are or will be."""
        if not self._asked and kernels() is not None:
            self.make(None, StandIn(nn.Module(), (torch.empty(0, device=device),), {}))

    def make(self, _variant: object, stand_in: StandIn) -> None:
        self._asked = True
        compiler.ask(self, stand_in, self._done)

    def _done(self) -> None:
        """The thread is; where it had no room, or no compiler, it is asked again, but not for ever."""
        self._tries += 1
        self._asked = self.ready or self._tries == MOST_TRIES

    def compile_ahead(self, stand_in: StandIn) -> None:
        found, device = kernels(), stand_in.device
        for dtype in (torch.float16, torch.bfloat16):
            image = torch.zeros(1, 320, 64, 64, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
            weight = torch.zeros(320, dtype=dtype, device=device)
            factors = found.factors_of(image, 32, weight, weight, 1e-5)
            for silu in (False, True):
                found.apply_factors(image, factors, torch.empty_like(image), silu)
            found.channels_last_weight(torch.zeros(320, 320, 3, 3, dtype=dtype, device=device))
        self.ready = True


norm_kernels = _NormKernels()
