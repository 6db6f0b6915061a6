"""Give a model the attention kernel that is fastest for it, unless the user or another node has chosen one."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..attention import CHECKPOINT, AttentionSurvey, in_words, override_for
from ..disk_cache import current, folder_name
from ..layouts import copied_containers
from ..per_model import PerModel
from ..structure import structure_of
from .asked import OPTIONS_AT

OVERRIDE = "optimized_attention_override"
MEMORY = "attention"
logger = logging.getLogger("torch-compile-kit")

# Per model, what the input asked for -> the kernel found. One that changed with the length of the prompt would recompile.
_chosen: PerModel[dict[str, str]] = PerModel(lambda _network: {})
# Where newer hosts keep the attention that a checkpoint or a LoRA asks for (0.38, comfy/ldm/modules/attention.py), if it does.
_preferences: PerModel[list[nn.Module]] = PerModel(
    lambda network: [module for module in network.modules() if type(module).__name__ == "ComfyAttention"]
)


def chosen_kernel(network: nn.Module, wanted: str) -> str | None:
    """The kernel in use, `host` for what ComfyUI takes, CHECKPOINT for what it takes there; None before the first run."""
    return _chosen(network).get(wanted)


def with_attention(wanted: str, executor, args: tuple, kwargs: dict) -> tuple:
    """The arguments of the host's `apply_model` with our kernel in the options, where it may be.

    Args:
        wanted: the `attention` input.
        executor: of an APPLY_MODEL wrapper; may be called once to measure.
    """
    options = args[OPTIONS_AT] if len(args) > OPTIONS_AT else None
    if wanted == "host" or options is None or OVERRIDE in options or not _can_measure(args[0].device):
        return args
    base_model = executor.class_obj
    chosen = _chosen(base_model.diffusion_model)
    before = chosen.get(wanted)
    if wanted == "auto" and _prefers_its_own(base_model.diffusion_model):
        chosen[wanted] = CHECKPOINT  # an override would come before it (`wrap_attn`)
    elif before in (None, CHECKPOINT):
        chosen[wanted] = _choose(wanted, executor, args, kwargs)
    if chosen[wanted] != before:
        logger.info("%s: attention: %s", type(base_model).__name__, in_words(chosen[wanted]))
    override = override_for(chosen[wanted])
    return args if override is None else _with_override(args, override)


def _can_measure(device: torch.device) -> bool:
    """Where calls can be timed. AMD's cards, also called cuda, are measured for themselves."""
    return device.type == "cuda"


def _prefers_its_own(network: nn.Module) -> bool:
    return any(getattr(module, "function", None) is not None for module in _preferences(network))


def _choose(wanted: str, executor, args: tuple, kwargs: dict) -> str:
    """Measured, or as measured before a restart: another choice would have to be compiled again."""
    network, cache = executor.class_obj.diffusion_model, current()
    folder = folder_name(type(network).__name__, structure_of(network))
    known = cache.recall(folder, MEMORY) if cache is not None and wanted == "auto" else None
    if isinstance(known, str) and (known == "host" or override_for(known) is not None):
        return known
    survey = AttentionSurvey(wanted)
    once, options = copied_containers((args, kwargs))
    executor(*_with_override(once, survey), **options)
    best = survey.best()
    if cache is not None and wanted == "auto" and survey.complete:
        cache.remember(folder, type(network).__name__, MEMORY, best)
    return best


def _with_override(args: tuple, override) -> tuple:
    options = {**args[OPTIONS_AT], OVERRIDE: override}
    return (*args[:OPTIONS_AT], options, *args[OPTIONS_AT + 1 :])
