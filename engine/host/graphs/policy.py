"""Decide for each call of a model whether CUDA graphs replay it: where that is possible, and where it pays.

Graphs pay for UNets. For other models they seem to pay if the GPU waits for the CPU in compiled steps, which is measured; the
first capture tells whether they do. Eager steps do not tell: in those of Flux the GPU is as far behind with weights in bf16 as
in INT8, and graphs help only with INT8.
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

# Graphs pay if the GPU, when the next call begins, works on for less than this part of the time that launching a call takes.
MAX_BACKLOG = 0.3
# Of what the host does between two calls, at most this part of the launching time counts: in a preview it may wait for the GPU.
MOST_BETWEEN = 0.25
# Calls that are measured. The median counts: on one machine single calls of Flux gave 0.01 to 0.47.
MEASURED_CALLS = 3
# A capture has to be saved back within so many calls: a LoRA, a size or a prompt length that has changed needs another one. For
# Flux on H200s whose processors are slow it took 0.4 to 0.8 s, and a replay saved 0.003 to 0.017 s a call.
CALLS_TO_PAY = 40
# What takes longer than so many times that is believed for good: a busy machine makes a capture take some times as long.
FAR_FROM = 3
# The GPU's time grows with the size, the CPU's does not: what does not pay for one size may for one so much smaller.
SMALLER = 0.9


class Notes(list[str]):
    """Sentences of the report about the last run, beside counts. Each is logged once."""

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
    """Choose how a call runs; `notes` gets why graphs that would pay are impossible. `size`: numbers in the latent."""
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
    """Whether all calls are replayed, also before blocks are compiled: true for UNets. Replays more than halve a UNet's steps
    where the GPU waits for the CPU, and convolutions in a graph are channels_last on any machine (replay.py)."""
    return settings.may_have_graphs and no_graphs(device) is None and has_convolutions(network)


def has_convolutions(network: nn.Module) -> bool:
    """Whether a model has blocks of convolutions, which may stay eager."""
    return any(map(is_convolutional, modules_at(network, plan_for(network))))


def no_graphs(device: torch.device) -> str | None:
    """Why work on `device` cannot be captured; an empty text where no user would expect CUDA graphs."""
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
        pay_to: they do up to this size of a latent; `not_from`: from this size on the GPU is busy enough without them.
        saved_to: up to this size a capture in this process was soon saved back; `refused_from`: from this size on one was not.
        refused_before: from this size on one was not in an earlier process, the last that captured one.
        ran: size -> `ModelCode.compiles` after its last call: the first call with new code is not measured.
        backlogs: size -> what measured calls of that code leave to the GPU, as a share of the time of launching.
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
    """With what an earlier process has measured."""
    cache = current()
    kept = _KEPT.fullmatch(cache.choices(name_of(network)).get("graphs pay", "")) if cache is not None else None
    with suppress(ValueError):  # a file that was made elsewhere
        return Payoff(float(kept[1]), float(kept[2]), refused_before=float(kept[3] or math.inf)) if kept else Payoff()
    return Payoff()


_KEPT = re.compile(r"pay to (\S+), not from ([^\s,]+)(?:, refused from (\S+))?")
payoff_of = PerModel(_payoff_for)
# Structures of which this process has refused a capture: another model of them reads that from disk.
_refused_here: set[str] = set()
# For each card, if the call before was measured: whose it was, in which run of the sampler, and when it was over.
_before: dict[torch.device, tuple[Payoff, int, float]] = {}


def forget_last_call(device: torch.device) -> None:
    """A call that was not measured lies between the last measured one and the next."""
    _before.pop(device, None)


def measure(network: nn.Module, device: torch.device, size: int, call: ModelCall, run: Callable[[], object]) -> object:
    """Make a call. If it is not the first of its code and size, measure for how long the GPU would be busy in the next call."""
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
    if call.uncompiled or not call.ran or code.compiles != compiles:  # or a step cache of another node has skipped the call
        return result
    launching = max(launched - began, 1e-9)
    between = 0.0
    if before is not None and before[:2] == (payoff, code.runs):
        between = min(called - before[2], MOST_BETWEEN * launching)
    others = began - called  # of the GPU's time, for what else the host has launched (ControlNets, previews)
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
    """What is told what a capture has cost and saves at this size, see `ModelGraphs.call`; None where nothing depends on it."""
    is_asked = not settings.wants_graphs and not has_convolutions(network) and size > payoff_of(network).saved_to
    return functools.partial(_judge, network, size) if is_asked else None


def _judge(network: nn.Module, size: int, cost: float, saved: float) -> None:
    """Believe one capture that pays. After one that does not there are no graphs in this process, and in later ones if it was
    far from it or the second in two processes: on a busy machine it may have been the first of many."""
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
