"""Decide for each call of a model whether CUDA graphs replay it: where that is possible, and where it pays.

Graphs pay where the GPU waits for the CPU in eager steps: measured, not by the model's name.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...cache.disk import current
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...log import logger
from ...per_model import PerModel
from ...settings import CompileSettings
from ...torch_compat import private

# Graphs pay if the GPU, after a call was launched, works on for less than this part of the time that launching took.
MAX_BACKLOG = 0.3


class Way(enum.Enum):
    """How one call of a model runs."""

    MEASURED = enum.auto()  # eager, to see whether graphs pay
    REPLAYED = enum.auto()  # from a CUDA graph, or to become one
    COMPILED = enum.auto()  # block by block, though graphs would be possible
    WITHOUT_GRAPHS = enum.auto()  # block by block: there can be none


def way_of_call(
    settings: CompileSettings, network: nn.Module, device: torch.device, synchronous: bool, notes: list[str]
) -> Way:
    """How the next call runs, which changes once `measure` has timed a call; `notes` gets why wanted graphs are impossible."""
    obstacle = no_graphs(device) if settings.may_have_graphs else ""
    if obstacle is not None:
        if obstacle and settings.wants_graphs:
            note(notes, obstacle)
        return Way.WITHOUT_GRAPHS
    pays = settings.wants_graphs or recall(network)
    if pays is None:
        return Way.MEASURED
    # Until all code is there calls are replayed as well: beside a thread that compiles, launching kernels is slow.
    if pays or (not synchronous and code_of(network).is_being_compiled):
        return Way.REPLAYED
    if graphs_of(network).graphs:
        graphs_of(network).drop()
    return Way.COMPILED


def no_graphs(device: torch.device) -> str | None:
    """Why work on `device` cannot be captured; an empty text where no user would expect CUDA graphs."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return "CUDA graphs are off: they have not been measured on AMD's devices."
    allocator = torch.cuda.get_allocator_backend()
    if allocator == "cudaMallocAsync":
        version = ".".join(torch.__version__.split(".")[:2])
        if version in private.CAPTURES_ASYNC:
            return None
        return (
            f"CUDA graphs are off: with cudaMallocAsync, ComfyUI's default, they have not been tested with PyTorch {version}. "
            "Start ComfyUI with --disable-cuda-malloc to have them."
        )
    if allocator != "native":
        return f"CUDA graphs are off: another node has given PyTorch an allocator ({allocator})."
    return None


@dataclass
class Payoff:
    calls: int = 0  # eager calls so far; the first also loads weights
    pays: bool | None = None  # None until `measure` has timed a call


payoff_of: PerModel[Payoff] = PerModel(lambda _network: Payoff())


def recall(network: nn.Module) -> bool | None:
    """Whether graphs pay for the network; None if neither this process nor an earlier process has measured the network."""
    payoff, cache = payoff_of(network), current()
    if payoff.pays is None and payoff.calls == 0 and cache is not None:
        payoff.pays = {"pay": True, "do not pay": False}.get(cache.recall(network, "graphs") or "")
    return payoff.pays


def measure(network: nn.Module, call: Callable[[], object]) -> object:
    """Make an eager call, and measure from the second on how long the GPU is busy after all of the call was launched."""
    payoff = payoff_of(network)
    payoff.calls += 1
    if payoff.calls == 1:
        return call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    backlog = (time.perf_counter() - launched) / (launched - began)
    payoff.pays = backlog < MAX_BACKLOG
    logger.info(
        "%s: CUDA graphs %s: the GPU works on for %.0f%% of the time that launching takes",
        type(network).__name__,
        "pay" if payoff.pays else "would not pay",
        100 * backlog,
    )
    cache = current()
    if cache is not None:
        cache.remember(network, "graphs", "pay" if payoff.pays else "do not pay")
    return result


def note(notes: list[str], text: str) -> None:
    """Put `text` into the log and the report, once."""
    if text not in notes:
        notes.append(text)
        logger.info("%s", text)
