"""Put compiling off until it would have paid: ski rental.

An uncompiled run loses what compiled code would have saved, compiling costs seconds, and nobody knows how many runs follow. Who
compiles when the losses reach the cost takes at most as long as the better of *always* and *never*, and one compilation. So
uncompiled runs are counted, for all models of a structure, which ComfyUI may free after each prompt (`--cache-none`, little
RAM), and on disk. The bound also holds for who compiles sooner, and large models should not wait: some runs are expected.

1. What a run saves: the mean over the runs so far and this one, whose first calls tell its length, times the share of a step
   that compiled code of the structure was seen to save, else SAVED.
2. Tracing is paid in each session: by the runs that it had so far, or those of a usual session.
3. Lowering and the rest are paid once, as the code is kept: by all runs so far, or PROMPTS. Both go by what tracing took.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ...cache.structure import name_of
from ...compile.registry import code_of
from ...compile_process.obtain import import_ahead
from ...notices.recompile_log import watch_of
from ...notices.status import tell_begun
from ...per_model import PerModel
from ..graphs.replay import has_convolutions
from .structure_record import Record, find_record, record_of

# What compiling costs prompts as a multiple of tracing, with lowering beside the sampler and loading: 3 to 5 s on two H100
# machines, where Flux traced for 2.3 (benchmarks/results).
FIRST_TIME = 2.0
# UNets also capture CUDA graphs, and their uncompiled calls wait for the CPU as compiling does: on a machine where a call takes
# 0.11 to 0.19 s it cost SDXL 10 s, so it is counted in calls, of at most so many seconds.
CALLS_OF_UNET, LONGEST_CALL = 60, 0.15
# Share of a step that compiling saves, with CUDA graphs for UNets (docs/measurements.md: 0.19 and more; 0.41 and more).
SAVED, SAVED_UNET = 0.2, 0.4
# Prompts that a session is expected to have.
PROMPTS = 10
# The first calls of the sampler load weights and kernels; the shortest between these two counts.
CALLS = 2, 4
# From so many steps on most models pay back: the compiler is imported while the first step loads the weights.
MANY_STEPS = 15

# Seconds after which compiling pays whatever it costs: the user has asked for it.
ENOUGH = 1e9

may_wait: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Payback:
    """Whether compiling a model is worth while.

    Args:
        after: in about how many prompts it will be; None: it is, or nothing was timed.
        _calls: of the sampler so far, in a run of `_steps`. With prompts that do not fit in one batch, each is several calls of
            the model.
        _seconds: of a call, the shortest so far, by latent shape: other programs may have used the GPU.
    """

    record: Record
    is_unet: bool
    after: int | None = None
    _sigmas: object = None
    _steps: int = 0
    _calls: int = 0
    _shape: torch.Size | None = None
    _began: float = 0.0
    _seconds: dict[torch.Size | None, float] = field(default_factory=dict)

    def put_off(self) -> tuple[int, str] | None:
        """In how many prompts compiling begins, and what `begin_now` takes; None: it is not put off."""
        return None if self.after is None else (0 if self.record.is_decided else self.after, self.record.structure)

    def end_run(self, network: nn.Module) -> None:
        record, traced, share = self.record, code_of(network).traced, watch_of(network).saved
        if share is not None:  # what was slow once, on a busy machine, is tried again
            record.share = max(share, self._default_share() / 4)
        if traced:
            record.add_trace(traced)
            self.after = None
        elif self._calls and self._seconds and not record.is_decided:
            record.seconds += self._calls * self._call_seconds()
            record.runs += 1
        if traced or self._calls:
            record.runs_now += self._calls > 0
            record.keep()
        self._calls, self._sigmas = 0, None

    def is_worthwhile(self, network: nn.Module, x: torch.Tensor, options: dict) -> bool:
        """Called before each call of the model that would not wait for code; False: it should run as without this pack.

        Args:
            x: the latent.
            options: the call's `transformer_options`; `sigmas` is one object in each call of the sampler, `sample_sigmas` has
                one number more than there are steps (comfy/samplers.py).
        """
        sigmas, all_steps = options.get("sigmas"), options.get("sample_sigmas")
        if sigmas is None or all_steps is None or len(all_steps) < 3 or not may_wait(x.device):
            return True
        record = self.record
        if not record.is_decided and any(group.code.has_code for group in code_of(network).groups.values()):  # a warmup's
            record.decide()
        if sigmas is not self._sigmas:
            self._sigmas, self._steps, self._calls, self._shape = sigmas, len(all_steps) - 1, self._calls + 1, x.shape
            if self._calls == 1 and not record.is_decided:
                self._decide_if_paid()
            self._measure(x.device)
        if record.is_decided:
            self.after = None
        elif len(all_steps) > MANY_STEPS:
            import_ahead()
        return record.is_decided

    def _measure(self, device: torch.device) -> None:
        """Time calls, and decide after the last of those that are timed."""
        last = min(CALLS[1], self._steps)
        first = max(1, last - CALLS[1] + CALLS[0])
        if self.record.is_decided or not first <= self._calls <= last:
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began, self._began = self._began, time.perf_counter()
        if self._calls != first:
            self._seconds[self._shape] = min(self._began - began, self._seconds.get(self._shape, math.inf))
        if self._calls == last and self._seconds:
            self._decide_if_paid(self._steps * self._call_seconds())  # Heun and others call the model twice a step

    def _call_seconds(self) -> float:
        """Of a call of this run; the first one may have had another shape."""
        return self._seconds.get(self._shape) or min(self._seconds.values())

    def _default_share(self) -> float:
        return SAVED_UNET if self.is_unet else SAVED

    def _decide_if_paid(self, expected: float = 0.0) -> None:
        """Args: expected: seconds that the calls of this run take uncompiled, if that is known."""
        record, is_timed = self.record, expected > 0
        seconds, runs, runs_now = record.seconds + expected, record.runs + is_timed, record.runs_now + is_timed
        if not runs:
            return
        saved = seconds / runs * (record.share or self._default_share())
        # PROMPTS weigh as much as half a session.
        usual_session = (PROMPTS + 2 * record.session_runs) / (1 + 2 * record.sessions)
        trace = record.expected_trace()
        # Runs that there were, runs that are expected, and the seconds that are to be saved in them.
        conditions: list[tuple[float, float, float]] = [(runs_now, usual_session, trace)]
        if not record.is_kept:
            call = min([LONGEST_CALL, *self._seconds.values()])
            conditions += [(runs, PROMPTS, max(trace, CALLS_OF_UNET * call) if self.is_unet else FIRST_TIME * trace)]
        if all(saved * max(were, usual) >= cost for were, usual, cost in conditions):
            record.seconds, record.runs = seconds, runs
            record.decide()
        elif is_timed:
            self.after = max(1, *(math.ceil(cost / max(saved, 1e-3) - were) for were, _, cost in conditions))


def begin_now(structure: object) -> bool:
    """Compile a model from its next call on, also in later sessions; False: no line offers it under this name."""
    record = find_record(structure)
    if record is not None:
        record.seconds, record.runs = ENOUGH, max(1.0, record.runs)
        record.decide()
        tell_begun(record.structure)
    return record is not None


payback_of: PerModel[Payback] = PerModel(lambda network: Payback(record_of(name_of(network)), has_convolutions(network)))
