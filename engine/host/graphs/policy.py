"""Decide for each call of a model whether a CUDA graph replays the call: only where that is possible, and pays.

Graphs always pay for UNets. For other models, `measure` finds whether the GPU waits for the CPU in compiled steps: then graphs
seem to pay, and the first capture shows whether they do. Eager steps do not show that: in eager steps of Flux the GPU is as far
behind with bf16 weights as with INT8 weights, and graphs help only with INT8.
"""

import enum
import functools
import math
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from ...background.model_call import ModelCall
from ...blocks.convolutions import is_convolutional
from ...cache.code_store import current
from ...cache.structure import name_of
from ...compile.binding import modules_at, plan_for
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...devices import others_in_use
from ...log import logger
from ...per_model import PerModel
from ...settings import CompileSettings
from ...torch_compat import private

# Graphs pay if, when the next call begins, the GPU is busy for less than this fraction of the time to launch a call (backlog).
MAX_BACKLOG = 0.3
# At most this fraction of the launch time counts as host work between two calls: in a preview the host may wait for the GPU.
MOST_BETWEEN = 0.25
# Calls that are measured. The median counts: on one machine single calls of Flux gave 0.01 to 0.47.
MEASURED_CALLS = 3
# A capture has to pay off within so many calls: a changed LoRA, size or prompt length needs another capture. For Flux on H200s
# with slow processors a capture took 0.4 to 0.8 s, and a replay saved 0.003 to 0.017 s a call.
CALLS_TO_PAY = 40
# A capture that takes over so many times that is refused for good; a smaller excess may come from a busy machine.
FAR_FROM = 3
# The GPU's time grows with the size, the CPU's does not: graphs that do not pay for one size may pay below this fraction of it.
SMALLER = 0.9


class Notes(list[str]):
    """Sentences about the last run, for the report. Each sentence is logged once."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()

    def add(self, text: str) -> None:
        if text not in self:
            self.append(text)
        if text not in self._logged:
            self._logged.add(text)
            logger.info("%s", text)


class Way(enum.Enum):
    """How one call of a model runs."""

    REPLAYED = enum.auto()  # from a CUDA graph, or run to capture one
    MEASURED = enum.auto()  # block by block, to see whether graphs pay
    COMPILED = enum.auto()  # block by block


def way_of_call(settings: CompileSettings, network: nn.Module, device: torch.device, size: int, notes: Notes) -> Way:
    """Choose how a call runs; `notes` gets the reason if graphs would pay but are impossible. `size`: numbers in the latent."""
    obstacle = no_graphs(device) if settings.may_have_graphs else ""
    if obstacle is not None:
        if obstacle and (settings.wants_graphs or has_convolutions(network)):
            notes.add(obstacle)
        if graphs_of(network).hold_memory:  # captured under another setting
            graphs_of(network).drop()
        return Way.COMPILED
    payoff = payoff_of(network)
    pays = settings.wants_graphs or has_convolutions(network) or payoff.pays(size)
    if pays:
        _before.pop(device, None)
        return Way.REPLAYED
    code = code_of(network)
    if graphs_of(network).graphs and (code.compiles or code.uncalled) and not payoff.pay_to:
        graphs_of(network).forget()
    is_eager = code.uncalled or any(group.failure for group in code.groups.values())  # blocks run as without this pack
    if pays is None and not code.is_being_compiled and not is_eager:
        return Way.MEASURED
    _before.pop(device, None)
    return Way.COMPILED


def always_replays(settings: CompileSettings, network: nn.Module, device: torch.device) -> bool:
    """Whether all calls are replayed, even before blocks are compiled: true for UNets. Replays more than halve the time of a
    UNet's steps where the GPU waits for the CPU, and convolutions in a graph are channels_last on any machine (replay.py)."""
    return settings.may_have_graphs and no_graphs(device) is None and has_convolutions(network)


def has_convolutions(network: nn.Module) -> bool:
    """Whether a model has blocks of convolutions, which may stay eager."""
    return any(map(is_convolutional, modules_at(network, plan_for(network))))


def no_graphs(device: torch.device) -> str | None:
    """Why work on `device` cannot be captured, or None; an empty string if no user would expect CUDA graphs there."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "CUDA graphs are off: they have not been measured on AMD's devices."
    allocator, version = torch.cuda.get_allocator_backend(), ".".join(torch.__version__.split(".")[:2])
    if version in private.FREES_WORKSPACES:
        return f"CUDA graphs are off: in PyTorch {version} freeing one breaks the others (pytorch#193402). Use 2.11 or 2.15."
    if allocator == "cudaMallocAsync":
        if version not in private.CAPTURES_ASYNC:
            reason = f"with cudaMallocAsync, ComfyUI's default, they have not been tested with PyTorch {version}"
        elif others := others_in_use(device):
            used = " and ".join(map(str, others))
            reason = f"ComfyUI has used {used}, too, and with cudaMallocAsync, its default, a failed capture could then end it"
        else:
            return None
        return f"CUDA graphs are off: {reason}. Start ComfyUI with --disable-cuda-malloc to have them."
    if allocator != "native":
        return f"CUDA graphs are off: another node has given PyTorch an allocator ({allocator})."
    return None


@dataclass(eq=False)
class Payoff:
    """Whether graphs pay for a network.

    Args:
        pay_to: graphs pay up to this size of a latent; `not_from`: from this size on the GPU is busy enough without graphs.
        saved_to: up to this size a capture in this process paid off; `refused_from`: from this size on a capture did not.
        refused_before: as `refused_from`, in the last earlier process that captured a graph.
        ran: size -> `ModelCode.compiles` after the last call of that size: the first call with new code is not measured.
        backlogs: size -> the GPU's backlog after each measured call of that code, as a fraction of the launch time.
    """

    pay_to: float = 0
    not_from: float = math.inf
    saved_to: float = 0
    refused_from: float = math.inf
    refused_before: float = math.inf
    ran: dict[int, int] = field(default_factory=dict)
    backlogs: dict[int, list[float]] = field(default_factory=dict)

    def pays(self, size: int) -> bool | None:
        """Whether graphs pay at this size; None if neither this process nor an earlier one has measured it."""
        if size >= min(self.not_from, self.refused_from):
            return False
        return size <= self.pay_to or None


def _payoff_for(network: nn.Module) -> Payoff:
    """With the measurements of an earlier process, if the cache holds any."""
    cache = current()
    kept = _KEPT.fullmatch(cache.choices(name_of(network)).get("graphs pay", "")) if cache is not None else None
    with suppress(ValueError):  # the file may be from another machine
        return Payoff(float(kept[1]), float(kept[2]), refused_before=float(kept[3] or math.inf)) if kept else Payoff()
    return Payoff()


_KEPT = re.compile(r"pay to (\S+), not from ([^\s,]+)(?:, refused from (\S+))?")
payoff_of = PerModel(_payoff_for)
# Structures whose capture this process has refused: another model of the same structure reads that from disk.
_refused_here: set[str] = set()
# For each device whose last call was measured: the `Payoff` of its network, the number of the sampling run, and the end time.
_before: dict[torch.device, tuple[Payoff, int, float]] = {}


def forget_last_call(device: torch.device) -> None:
    """Called after a call that was not measured, and so lies between the last measured call and the next."""
    _before.pop(device, None)


def measure(network: nn.Module, device: torch.device, size: int, call: ModelCall, run: Callable[[], object]) -> object:
    """Make a call. If it is not the first of its code and size, measure how long the GPU would be busy in the next call."""
    payoff, code = payoff_of(network), code_of(network)
    compiles, called, before = code.compiles, time.perf_counter(), _before.pop(device, None)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    result = run()
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    ended = time.perf_counter()
    _before[device] = payoff, code.runs, ended
    if payoff.ran.get(size) != compiles:
        payoff.backlogs.pop(size, None)
        if call.ran:
            payoff.ran[size] = code.compiles
        return result
    if call.uncompiled or not call.ran or code.compiles != compiles:  # `not ran`: a step cache has skipped the call
        return result
    launching = max(launched - began, 1e-9)
    between = 0.0
    if before is not None and before[:2] == (payoff, code.runs):
        between = min(called - before[2], MOST_BETWEEN * launching)
    others = began - called  # GPU time of other work that the host has launched (ControlNets, previews)
    backlogs = payoff.backlogs.setdefault(size, [])
    backlogs.append((ended - launched + others - between) / launching)
    if len(backlogs) < MEASURED_CALLS:
        return result
    backlog = max(0.0, statistics.median(payoff.backlogs.pop(size)))
    seem_to_pay = backlog < MAX_BACKLOG
    if seem_to_pay:
        payoff.pay_to = size
    else:
        payoff.not_from = size
    logger.info(
        "%s: CUDA graphs %s: when the next call begins, the GPU works on for %.0f%% of the time that launching takes",
        type(network).__name__,
        "seem to pay" if seem_to_pay else "would not pay",
        100 * backlog,
    )
    _keep(network, payoff)
    return result


def _keep(network: nn.Module, payoff: Payoff) -> None:
    cache = current()
    if cache is not None:
        kept = f"pay to {payoff.pay_to}, not from {payoff.not_from}, refused from {payoff.refused_before}"
        cache.remember(name_of(network), {"graphs pay": kept})


def judge_for(settings: CompileSettings, network: nn.Module, size: int) -> Callable[[float, float], None] | None:
    """The argument `pays` of `ModelGraphs.call` for calls of this size; None if graphs are used whatever they save."""
    is_asked = not settings.wants_graphs and not has_convolutions(network) and size > payoff_of(network).saved_to
    return functools.partial(_judge, network, size) if is_asked else None


def _judge(network: nn.Module, size: int, cost: float, saved: float) -> None:
    """Use graphs after one capture that pays. After a capture that does not, use none in this process; nor in later processes,
    if the capture was far too slow or is the second refused in two processes. A busy machine may have slowed a single one."""
    payoff = payoff_of(network)
    if saved * CALLS_TO_PAY >= cost:
        payoff.saved_to = size
        if payoff.refused_before <= size:
            payoff.refused_before = math.inf
            _keep(network, payoff)
        return
    refused_from = payoff.refused_from = SMALLER * size
    if not payoff.saved_to:
        is_second = payoff.refused_before <= size and name_of(network) not in _refused_here
        _refused_here.add(name_of(network))
        if saved * FAR_FROM * CALLS_TO_PAY < cost or is_second:
            payoff.pay_to, payoff.not_from = 0, min(payoff.not_from, refused_from)
        payoff.refused_before = min(payoff.refused_before, refused_from)
        _keep(network, payoff)
    payoff.pay_to = payoff.saved_to
    text = "%s: CUDA graphs would not pay: to capture one takes %.2f s, and a replay saves %.3f s"
    logger.info(text, type(network).__name__, cost, saved)
