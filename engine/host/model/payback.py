"""Put compiling off while it would take longer than it is likely to save: few steps, of a model that is fast already.

Compiling Z-Image on an H100 costs prompts some 4 s in all, and saves 0.2 s in each of nine steps: thirteen prompts took 1.2
times as long as without this pack. How many prompts will follow nobody knows; a good guess is as many as have run, and of the
same kinds.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ...compile.registry import code_of
from ...compile_process.loading import import_ahead
from ...per_model import PerModel
from ..graphs.replay import has_convolutions

# Seconds that tracing, and lowering beside the sampler, cost prompts: 3 to 5 on two H100 machines (benchmarks/results).
COST = 3.0
# UNets also capture CUDA graphs, and their uncompiled calls wait for the CPU as compiling does: on a machine where a call takes
# 0.11 to 0.19 s it cost SDXL 10 s, so it is counted in calls, of at most so many seconds.
CALLS_OF_UNET, LONGEST_CALL = 60, 0.15
# Share of a step that compiling saves, with CUDA graphs for UNets (docs/measurements.md: 0.19 and more; 0.41 and more).
SAVED, SAVED_UNET = 0.2, 0.4
# Prompts that are expected to follow, at least.
PROMPTS = 10
# The first calls of the sampler load weights and kernels; the shortest between these two counts.
CALLS = 2, 4
# From so many steps on most models pay back: the compiler is imported while the first step loads the weights.
MANY_STEPS = 15

may_wait: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Payback:
    """Whether compiling a model is worth while.

    Args:
        after: from how many prompts on; None: not put off.
        may_choose_attention: beside a call that is not compiled, if a choice takes one (attention_choice.py).
        _calls: calls of the sampler in this run; with prompts that do not fit in one batch, each is several calls of the model.
        _runs: how many there were, by latent shape and number of steps.
        _most_calls: in one run, by the same. Heun and others call the model twice a step.
        _seconds: of a call of the sampler, the shortest so far, by the same: other programs may have used the GPU.
    """

    prompts: int = 0
    after: int | None = None
    may_choose_attention: bool = False
    _is_decided: bool = False
    _sigmas: object = None
    _calls: int = 0
    _began: float | None = None
    _runs: Counter[tuple] = field(default_factory=Counter)
    _most_calls: dict[tuple, int] = field(default_factory=dict)
    _seconds: dict[tuple, float] = field(default_factory=dict)

    def new_run(self) -> None:
        self.prompts, self._calls, self._sigmas = self.prompts + 1, 0, None

    def is_worthwhile(self, network: nn.Module, x: torch.Tensor, options: dict) -> bool:
        """Called before each call of the model that would not wait for code; False: it should run as without this pack.

        Args:
            x: the latent.
            options: the call's `transformer_options`; `sigmas` is one object in each call of the sampler, `sample_sigmas` has
                one number more than there are steps (comfy/samplers.py).
        """
        sigmas, all_steps = options.get("sigmas"), options.get("sample_sigmas")
        if self._is_decided or sigmas is None or all_steps is None or len(all_steps) < 3 or not may_wait(x.device):
            return True
        if any(group.code.has_code for group in code_of(network).groups.values()):
            self._is_decided, self.after = True, None  # by a warmup
            return True
        if len(all_steps) > MANY_STEPS:
            import_ahead()
        if sigmas is not self._sigmas:
            self._sigmas, self._calls = sigmas, self._calls + 1
            self._measure(network, x, len(all_steps) - 1)
        self.may_choose_attention = self.after is None and not _is_short(network, len(all_steps) - 1)
        return self._is_decided

    def _measure(self, network: nn.Module, x: torch.Tensor, steps: int) -> None:
        kind = x.shape, steps
        self._runs[kind] += self._calls == 1
        self._most_calls[kind] = max(steps, self._calls, self._most_calls.get(kind, 0))
        last = min(CALLS[1], steps)
        first = max(1, last - CALLS[1] + CALLS[0])
        number = self._calls
        if not first <= number <= last:
            return
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        began, self._began = self._began, time.perf_counter()
        if number != first and began is not None:
            self._seconds[kind] = min(self._began - began, self._seconds.get(kind, math.inf))
        if number != last or not self._seconds:
            return
        run_seconds = {kind: self._most_calls[kind] * seconds for kind, seconds in self._seconds.items()}
        runs = {kind: max(1, self._runs[kind]) for kind in run_seconds}  # the first call may have been another kind
        usual = sum(runs[kind] * run_seconds[kind] for kind in run_seconds) / sum(runs.values())
        is_unet = has_convolutions(network)
        saved = usual * (SAVED_UNET if is_unet else SAVED)
        cost = max(COST, CALLS_OF_UNET * min(*self._seconds.values(), LONGEST_CALL)) if is_unet else COST
        self._is_decided = saved * max(PROMPTS, self.prompts) >= cost
        self.after = None if self._is_decided else math.ceil(cost / max(saved, 1e-3))


def _is_short(network: nn.Module, steps: int) -> bool:
    """Whether so few steps of a UNet cannot pay back soon, however long they take: then nothing is measured for it."""
    return has_convolutions(network) and steps * SAVED_UNET * PROMPTS < CALLS_OF_UNET


payback_of: PerModel[Payback] = PerModel(lambda _network: Payback())
