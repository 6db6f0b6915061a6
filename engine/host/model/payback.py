"""Put compiling off while it would take longer than it is likely to save: few steps, of a model that is fast already.

Compiling Z-Image on an H100 costs prompts some 4 s in all, and saves 0.2 s in each of nine steps: thirteen prompts took 1.2
times as long as without this pack. How many prompts will follow nobody knows; a good guess is as many as have run, and of the
same kinds.

What is counted outlives the model, which ComfyUI may free after each prompt (`--cache-none`, little RAM): it goes on for the
next model of the same structure. That compiling was decided on is kept with the code, so that the next session begins with it.
"""

import math
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ...cache.code_store import current
from ...cache.structure import name_of
from ...compile.registry import code_of
from ...compile_process.obtain import import_ahead
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

# Freed models whose counts are kept.
MOST_FREED = 32
CHOICE, DECIDED = "compiled", "yes"

may_wait: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Payback:
    """Whether compiling a model is worth while.

    Args:
        structure: the model's name, see `cache/structure.py`.
        after: from how many prompts on; None: not put off.
        may_choose_attention: beside a call that is not compiled, if a choice takes one (attention_choice.py).
        _calls: calls of the sampler in this run; with prompts that do not fit in one batch, each is several calls of the model.
        _runs: how many there were, by latent shape and number of steps.
        _most_calls: in one run, by the same. Heun and others call the model twice a step.
        _seconds: of a call of the sampler, the shortest so far, by the same: other programs may have used the GPU.
    """

    structure: str
    prompts: int = 0
    after: int | None = None
    may_choose_attention: bool = False
    _is_decided: bool = False
    _was_asked: bool = False
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
        if any(group.code.has_code for group in code_of(network).groups.values()) or self._was_decided():  # by a warmup, before
            self._decide()
            return True
        if len(all_steps) > MANY_STEPS:
            import_ahead()
        if sigmas is not self._sigmas:
            self._sigmas, self._calls = sigmas, self._calls + 1
            self._measure(network, x, len(all_steps) - 1)
        is_likely = self._is_decided or (self.after is None and len(all_steps) > MANY_STEPS)
        self.may_choose_attention = is_likely and not _is_short(network, len(all_steps) - 1)
        return self._is_decided

    def _was_decided(self) -> bool:
        """Whether compiling was decided on in an earlier session: its code is kept, too."""
        was_asked, self._was_asked = self._was_asked, True
        store = None if was_asked else current()
        return store is not None and store.recall(self.structure, CHOICE) == DECIDED

    def _decide(self) -> None:
        self._is_decided, self.after = True, None
        if (store := current()) is not None:
            store.remember(self.structure, CHOICE, DECIDED)

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
        if saved * max(PROMPTS, self.prompts) >= cost:
            self._decide()
        else:
            self.after = math.ceil(cost / max(saved, 1e-3))


def _is_short(network: nn.Module, steps: int) -> bool:
    """Whether so few steps of a UNet cannot pay back soon, however long they take: then nothing is measured for it."""
    return has_convolutions(network) and steps * SAVED_UNET * PROMPTS < CALLS_OF_UNET


def _begin(network: nn.Module) -> Payback:
    structure = name_of(network)
    payback = _freed.pop(structure, None) or Payback(structure)
    weakref.finalize(network, _keep, payback).atexit = False
    return payback


def _keep(payback: Payback) -> None:
    """Keep the counts of a model that is freed, the newest last."""
    payback._sigmas = None
    _freed.pop(payback.structure, None)
    _freed[payback.structure] = payback
    if len(_freed) > MOST_FREED:
        _freed.pop(next(iter(_freed)), None)


_freed: dict[str, Payback] = {}
payback_of: PerModel[Payback] = PerModel(_begin)
