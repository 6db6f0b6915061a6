"""Put compiling off while it would take longer than it is likely to save: few steps, of a model that is fast already.

Compiling Z-Image on an H100 costs prompts some 4 s in all, and saves 0.2 s in each of nine steps: thirteen prompts took 1.2
times as long as without this pack. How many prompts will follow nobody knows; a good guess is as many as have run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...cache.startup import is_preparing
from ...compile.registry import code_of
from ...per_model import PerModel
from ..graphs.policy import recall
from ..graphs.replay import has_convolutions

# Seconds that tracing, and lowering beside the sampler, cost prompts: 3 to 5 on two H100 machines (benchmarks/results).
COST = 3.0
# Share of a step that compiling saves, with CUDA graphs for UNets (docs/measurements.md: 0.19 and more; 0.41 and more).
SAVED, SAVED_UNET = 0.2, 0.4
# Prompts that are expected to follow, at least.
PROMPTS = 10
# The first steps load weights and kernels; the time between these two is measured.
STEPS = 2, 4

may_wait: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Payback:
    """Whether compiling a model is worth while; `after` is from how many prompts on, None: not put off."""

    prompts: int = 0
    after: int | None = None
    _is_decided: bool = False
    _step: object = None
    _steps: int = 0
    _began: float = 0.0
    _seconds: float = math.inf

    def new_run(self) -> None:
        self.prompts, self._steps, self._step = self.prompts + 1, 0, None

    def is_worthwhile(self, network: nn.Module, device: torch.device, options: dict) -> bool:
        """Called before each call of the model that would not wait for code; False: it should run as without this pack.

        Args:
            options: the call's `transformer_options`; `sigmas` is one object in all calls of a step, `sample_sigmas` has one
                number more than there are steps (comfy/samplers.py).
        """
        step, all_steps = options.get("sigmas"), options.get("sample_sigmas")
        if self._is_decided or step is None or all_steps is None or len(all_steps) < 3 or not may_wait(device):
            return True
        if any(group.code.has_code for group in code_of(network).groups.values()):
            self._is_decided, self.after = True, None  # by a warmup
            return True
        if step is not self._step:
            self._step, self._steps = step, self._steps + 1
            self._measure(network, device, len(all_steps) - 1)
        # The first steps of a model choose its attention and see whether CUDA graphs pay (attention_choice.py, policy.py).
        return self._is_decided or (self.after is None and recall(network) is None)

    def _measure(self, network: nn.Module, device: torch.device, steps: int) -> None:
        last = min(STEPS[1], steps)
        first = max(1, last - STEPS[1] + STEPS[0])
        if self._steps not in (first, last):
            return
        if is_preparing():  # which slows steps: no measure
            self._steps = steps
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if self._steps == first:
            self._began = time.perf_counter()
            return
        seconds = (time.perf_counter() - self._began) / (last - first)
        # The shortest so far: a batch of two may come once, and other programs may have used the GPU.
        self._seconds = min(self._seconds, seconds * steps)
        saved = self._seconds * (SAVED_UNET if has_convolutions(network) else SAVED)
        self._is_decided = saved * max(PROMPTS, self.prompts) >= COST
        self.after = None if self._is_decided else math.ceil(COST / max(saved, 1e-3))


payback_of: PerModel[Payback] = PerModel(lambda _network: Payback())
