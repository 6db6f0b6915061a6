"""Whether CUDA graphs pay for a model: where the GPU waits for the CPU in eager steps. Measured, not by the model's name."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...blocks.structure import structure_of
from ...cache.disk import current, folder_name
from ...per_model import PerModel

MEMORY = "graphs"
# Of the time that launching a call takes, what the GPU goes on working behind it where it is the GPU that limits.
SHARE = 0.3
logger = logging.getLogger("torch-compile-kit")


@dataclass
class Payoff:
    """What is known of a model.

    Args:
        calls: eager calls so far; the first also loads weights.
        pays: None until it has been measured.
    """

    calls: int = 0
    pays: bool | None = None


payoff_of: PerModel[Payoff] = PerModel(lambda _network: Payoff())


def recall(network: nn.Module) -> bool | None:
    """Whether graphs pay for it; None if nobody has measured it, in this process or before a restart."""
    found, cache = payoff_of(network), current()
    if found.pays is None and found.calls == 0 and cache is not None:
        known = cache.recall(_folder(network), MEMORY)
        found.pays = {"pay": True, "do not pay": False}.get(known)
    return found.pays


def measure(network: nn.Module, call: Callable[[], object]) -> object:
    """Make an eager call, and see from the second on whether the GPU is still busy when all of it has been launched."""
    found = payoff_of(network)
    found.calls += 1
    if found.calls == 1:
        return call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    behind = (time.perf_counter() - launched) / (launched - began)
    found.pays = behind < SHARE
    logger.info(
        "%s: CUDA graphs %s: the GPU works on for %.0f%% of the time that launching takes",
        type(network).__name__,
        "pay" if found.pays else "would not pay",
        100 * behind,
    )
    cache = current()
    if cache is not None:
        cache.remember(_folder(network), type(network).__name__, MEMORY, "pay" if found.pays else "do not pay")
    return result


def _folder(network: nn.Module) -> str:
    return folder_name(type(network).__name__, structure_of(network))
