"""Put compiling off until it would have paid off: the ski rental problem.

An uncompiled run loses the time that compiled code would have saved, compiling costs seconds, and nobody knows how many runs
follow. Compiling when the losses reach the cost takes at most one compilation longer than the better of *always* and *never*.
So uncompiled runs are counted: on disk and per structure, as ComfyUI may free a model after each prompt (`--cache-none`, little
RAM). The bound also holds for compiling sooner, and large models should not wait: so some runs are expected in advance.

1. The saving per run is a run's mean seconds, over the runs so far and this one (estimated from its first calls), times the
   share of a step that compiled code of the structure was measured to save, else SAVED.
2. Tracing costs in each session: the session's runs so far, or as many as a usual session has, must save its cost.
3. Lowering and the rest cost once, as the code is kept: all runs so far, or RUNS runs, must save their cost. Both costs are
   estimated from the seconds of tracing.

A batch or patch for which a compiled model has no code may never come again. So the next trace waits until all calls that
lacked code, with those that the run still has when the code is there, lose what a trace costs. Blocks with code run compiled.

A UNet's operators are replayed from CUDA graphs at once (network_calls.py), which gives most of the gain: compiled code has to
pay off in comparison with these replays.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...cache.structure import name_of
from ...compile.registry import ModelCode, code_of
from ...compile_process.obtain import get_ready_to_compile
from ...cuda_graphs.capture import graphs_of
from ...devices import moment_of, seconds_between
from ...messages.recompile_log import is_warming, watch_of
from ...messages.status import tell_begun
from ...per_model import PerModel
from ...settings import CompileSettings
from .structure_record import SAVED, Record, find_record, record_of

# By how many seconds a first compilation delays prompts, lowering beside the sampler and loading included, as a multiple of the
# seconds of tracing: 3 to 5 s on two H100 machines, where tracing Flux took 2.3 s (benchmarks/results).
FIRST_TIME = 2.0
# Runs that a session is expected to have.
RUNS = 10
# Multiplications a second on a fast card: those of Flux on an H200.
FASTEST = 300e12
# First and last call of the sampler whose start is timed; the first call of all loads weights and kernels. The median of the
# calls between counts: one call may include one-time work, and a step cache may skip one.
CALLS = 2, 5
# From this call on, calls take as long as in later runs: a UNet's graph has been captured and checked.
SETTLED = 9

counts_runs_on: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Payback:
    """Decide whether compiling a model pays off.

    Args:
        after: in about how many runs of the sampler compiling will pay off; None: now, or nothing was timed.
        _steps: number of the sampler's steps in this run; `_replays`: until compiling begins operators are replayed.
        _calls: number of the sampler's calls in this run. If prompts do not fit in one batch, each is several model calls.
        _captured: how many graphs had been captured, and how many compared, when the run began.
        _began: number of a timed call -> its start, a result of `moment_of`, as synchronizing the GPU would slow steps.
        _runs_lacking: in about how many runs code that the last call lacked is traced; None: the call lacked no code.
        _lacking, _put_off, _traced: these attributes of `ModelCode` when the last call began; `_called`: the time of that.
        _call: seconds of a call as the CPU sees them.
        _at_once: number of the last run in which traces are not put off; `_pays`: in this run they are not, as they pay off.
    """

    record: Record
    after: int | None = None
    _sigmas: object = None
    _steps: int = 0
    _replays: bool = False
    _calls: int = 0
    _captured: tuple[int, int] = (0, 0)
    _device: torch.device | None = None
    _began: dict[int, Any] = field(default_factory=dict)
    _runs_lacking: int | None = None
    _lacking: int = 0
    _put_off: int = 0
    _traced: float = 0.0
    _called: float = 0.0
    _call: float = 0.0
    _at_once: int = 0
    _pays: bool = False

    def put_off(self) -> tuple[int, str] | None:
        """In how many runs compiling begins, and the structure, for `begin_now`; None: compiling is not put off."""
        return None if self.after is None else (0 if self.record.is_decided else self.after, self.record.structure)

    def may_capture(self, network: nn.Module) -> bool:
        """Whether operators may be captured in this call: not in a structure's first calls, which run as without this pack, for
        comparison; nor in a model's first run if that has few steps, as ComfyUI may free the model after each prompt."""
        runs = code_of(network).runs
        is_compared = not self.record.runs and runs < 2 and self._calls <= CALLS[1]
        return not is_compared and (self._steps >= SETTLED or runs > 1)

    def end_run(self, network: nn.Module) -> None:
        record, code, share = self.record, code_of(network), watch_of(network).saved
        if share is not None and not graphs_of(network).replays:  # with replays, `saved` is what the graphs save
            record.share = max(share, SAVED / 4)  # not 0: code that was slow once, on a busy machine, is tried again
        if self._calls:
            self._count_lost(code)
            if code.traced > self._traced:  # only a call of the next run shows what this trace does not fit
                self._at_once = code.runs + 1
        if code.traced:
            record.add_trace(code.traced - code.lowered)
            record.lost = 0.0 if self._pays else record.lost
            self.after = None
        elif self._began and not record.is_decided:
            with suppress(RuntimeError):  # raised by `_now` after a run that has failed
                # The mean of all calls from the first timed one on: a step cache may have skipped some of the first.
                first = SETTLED if SETTLED in self._began else min(self._began)
                call = seconds_between(self._began[first], self._now()) / (self._calls - first + 1)
                is_whole = self._calls >= min(CALLS[1], self._steps)  # a cancelled run tells little
                # Not a run in which a graph is captured: with few steps that is the second run, see `may_capture`.
                captures = code.runs == 2 or self._captured != _captures_of(network)
                if is_whole and (not self._replays or first == SETTLED or not captures):
                    record.seconds, record.runs = record.seconds + self._calls * call, record.runs + 1
                if record.runs:
                    self.after = max(1, self._runs_to_go(record.seconds, record.runs, record.runs_now + 1))
        if code.traced or self._calls:
            record.runs_now += self._calls > 0
            record.keep()
        if self._calls and not code.compiles and (record.is_decided or self.after == 1):
            get_ready_to_compile()  # in the pause between prompts: compiling begins in the next run, maybe in its middle
        self._calls, self._sigmas, self._began, self._replays, self._pays = 0, None, {}, False, False

    def is_worthwhile(
        self, network: nn.Module, x: torch.Tensor, options: dict, synchronous: bool = False, replays: bool = False
    ) -> bool:
        """Whether a call of the model should run compiled; asked before each call.

        Args:
            x: the latent.
            options: the call's `transformer_options`; each call of the sampler has another object `sigmas`; `sample_sigmas`
                has one number more than there are steps (comfy/samplers.py).
            synchronous: the call waits for code, and is not timed.
            replays: until compiling begins the model's operators are replayed.
        """
        sigmas, all_steps = options.get("sigmas"), options.get("sample_sigmas")
        if sigmas is None or all_steps is None or len(all_steps) < 2 or is_warming() or not counts_runs_on(x.device):
            return True
        record, code = self.record, code_of(network)
        if not record.is_decided and any(group.code.has_code for group in code.groups.values()):  # made by a warmup
            record.is_decided = True
        if sigmas is not self._sigmas:
            self._sigmas, self._calls, self._device = sigmas, self._calls + 1, x.device
            self._steps, self._replays = len(all_steps) - 1, replays
            self._begin_call(code)
            if self._calls == 1:
                self._captured = _captures_of(network)
            if not synchronous and not record.is_decided:
                least = least_seconds(network, x) * self._steps if self._calls == 1 and not replays else 0.0
                with suppress(RuntimeError):  # the device failed, or another node has changed its stream
                    self._decide(code.runs, least)
        if record.is_decided:
            self.after = None
        return synchronous or record.is_decided

    def puts_off_traces(self, network: nn.Module, settings: CompileSettings, at_once: bool) -> bool:
        """Whether further traces are put off in this call; asked after `is_worthwhile`.

        Args:
            at_once: no trace is put off.
        """
        code, record = code_of(network), self.record
        if at_once or record.is_asked or not self._calls:
            self._at_once, self._runs_lacking = code.runs + 1, None  # the next run shows what this run has left untraced
            return False
        groups = code.groups_of(settings)
        left = (self._steps - self._calls + 1) * self._call - max((group.code.lowering for group in groups), default=0.0)
        self._pays |= record.lost + max(0.0, left) * record.expected_share >= record.expected_trace(2)
        # After a graph break missing code goes unnoticed; discarded code is made again at once.
        is_unclear = any(group.stats.graph_breaks or (group.code.version and not group.code.has_code) for group in groups)
        if self._pays or is_unclear or not any(group.code.has_code for group in groups):
            self._at_once = max(self._at_once, code.runs)
        return code.runs > self._at_once

    def lacks(self) -> tuple[int, str] | None:
        """As `put_off`, for a further trace that the last call of the sampler lacked."""
        runs = self._runs_lacking
        return None if runs is None else (0 if self.record.is_asked else runs, self.record.structure)

    def _begin_call(self, code: ModelCode) -> None:
        now = time.perf_counter()
        if self._calls > 2:  # the call before was not the first, which loads weights
            self._call = now - self._called
        if self._calls > 1:
            self._count_lost(code)
        if code.put_off > self._put_off:  # the first traces go on, which were stopped as they took too long
            self._at_once = max(self._at_once, code.runs)
        self._called, self._put_off, self._traced = now, code.put_off, code.traced

    def _count_lost(self, code: ModelCode) -> None:
        """Count the seconds that the last call lost for lack of code. A run of two steps cannot be timed: it loses a trace."""
        lacks, self._lacking, self._runs_lacking = code.lacking > self._lacking, code.lacking, None
        if lacks:
            trace = self.record.expected_trace(2)
            lost = self._call * self.record.expected_share if self._steps > 2 else trace / self._steps
            self.record.lost += lost
            self._runs_lacking = max(1, math.ceil((trace - self.record.lost) / max(self._steps * lost, 1e-3)))

    def _decide(self, run: int, least: float) -> None:
        """Decide whether compiling begins: in the first call by earlier runs, in the last timed call also by this run. If
        operators are to be replayed, the timed calls do not decide, as replays begin later. In call SETTLED it is known whether
        other packs' code prevents replays: if so, that call decides. `least`: seconds that the run takes at least, if known."""
        record, last = self.record, min(CALLS[1], self._steps)
        if self._calls == 1:
            record.is_decided = record.runs > 0 and not self._runs_to_go(record.seconds, record.runs, record.runs_now)
            if not record.runs and not self._replays and not self._runs_to_go(least, 1, 1):
                get_ready_to_compile()  # beside the first call, which loads weights and kernels
            if self._steps == 1 and run > 1:  # the run's only call; an earlier run has loaded the weights
                self._began[1] = self._now()
        elif self._calls in (last, SETTLED) or self._is_timed():
            self._began[self._calls] = self._now()
            timed = [(a, b) for (n, a), (m, b) in itertools.pairwise(self._began.items()) if m == n + 1 < SETTLED]
            if self._calls in (last, SETTLED) and timed and not self._replays:
                call = statistics.median_low([seconds_between(*moments) for moments in timed])
                # Heun and others call the model twice a step.
                seconds, runs = record.seconds + self._steps * call, record.runs + 1
                self.after = self._runs_to_go(seconds, runs, record.runs_now + 1)
                if not self.after:
                    record.seconds, record.runs, record.is_decided = seconds, runs, True

    def _is_timed(self) -> bool:
        """Whether the start of this call is timed for the first decision: not if calls are replayed, and the run has enough
        calls for replays to settle. Other packs' code may end replays after some calls."""
        is_replayed = self._replays and self._steps >= SETTLED
        return not is_replayed and self._calls < SETTLED and len(self._began) <= CALLS[1] - CALLS[0]

    def _now(self) -> Any:
        return moment_of(self._device or torch.device("cpu"))

    def _runs_to_go(self, seconds: float, runs: float, runs_now: int) -> int:
        """In about how many runs compiling will have paid off, after `runs` that took `seconds`; 0: it has now."""
        record = self.record
        saved = max(seconds / runs * record.expected_share, 1e-3)
        # The mean of earlier sessions and of RUNS, which weighs as much as half a session.
        usual_session = (RUNS + 2 * record.session_runs) / (1 + 2 * record.sessions)
        # For each cost: the runs so far, the runs that are expected, and the seconds that they must save.
        conditions: list[tuple[float, float, float]] = [(runs_now, usual_session, record.expected_trace(2))]
        if not record.is_kept:
            conditions += [(runs, RUNS, FIRST_TIME * record.expected_trace(1))]
        return max(math.ceil(cost / saved - were) if saved * max(were, usual) < cost else 0 for were, usual, cost in conditions)


def least_seconds(network: nn.Module, x: torch.Tensor) -> float:
    """The least seconds of a transformer's call for the latent `x`. Most patches are 2x2; packed weights count less."""
    patches = x.numel() / x.shape[1] / 4 if x.dim() > 1 else 0
    return sum(parameter.numel() for parameter in network.parameters()) * patches / FASTEST


def _captures_of(network: nn.Module) -> tuple[int, int]:
    graphs = graphs_of(network)
    return graphs.captures, graphs.checks


def begin_now(structure: object) -> bool:
    """Compile a model from its next call on, also in later sessions; False: this session has no model of that structure."""
    record = find_record(structure)
    if record is not None:
        get_ready_to_compile()
        record.ask()
        tell_begun(record.structure)
    return record is not None


payback_of: PerModel[Payback] = PerModel(lambda network: Payback(record_of(name_of(network))))
