"""Give a model the attention kernel that is fastest for it, unless the user or another node has chosen one."""

import functools
import weakref
from collections.abc import Callable

import comfy.ldm.modules.attention as host_attention
import torch
from torch import nn

from ...attention_kernels import CHECKPOINT, HOST_FUNCTION, AttentionSurvey, in_words, override_for
from ...background.thread import Job, compiler
from ...cache.code_store import current
from ...cache.structure import name_of
from ...devices import gpu_locks
from ...errors import InvalidSetting
from ...log import logger
from ...per_model import PerModel
from ...settings import CompileSettings
from ...transformer_options.outside import OVERRIDE

# transformer_options among the arguments of `apply_model(x, t, c_concat, c_crossattn, control, transformer_options)`
OPTIONS_AT = 5

# Per model: value of the input `attention` -> kernel. One for all calls: another kernel for another prompt would recompile.
_chosen: PerModel[dict[str, str]] = PerModel(lambda _network: {})
# What this process has measured: (structure, input) -> kernel. ComfyUI may free a model after each prompt.
_measured: dict[tuple[str, str], str] = {}
# Per model, the survey whose kernels the worker loads, and the worker's job.
_being_prepared: PerModel[list[tuple[AttentionSurvey, Job]]] = PerModel(lambda _network: [])
# Per model, surveys in which the model did not call the host's attention: a step cache may have skipped the call. After
# MOST_UNASKED surveys the model seems to have an attention of its own.
_unasked: PerModel[list[AttentionSurvey]] = PerModel(lambda _network: [])
MOST_UNASKED = 3
# GPUs on which this process has loaded kernels.
_prepared: set[torch.device] = set()
# Modules in which ComfyUI 0.38 keeps the attention that a checkpoint or a LoRA asks for (comfy/ldm/modules/attention.py).
_preferences: PerModel[list[nn.Module]] = PerModel(
    lambda network: [module for module in network.modules() if type(module).__name__ == "ComfyAttention"]
)


def check_fullgraph(settings: CompileSettings) -> None:
    """Raise InvalidSetting if no block can be one graph because the host's attention asks for the free memory."""
    flags = {host_attention.attention_split: "split", host_attention.attention_sub_quad: "quad"}
    name = flags.get(host_attention.optimized_attention)
    if settings.enabled and settings.fullgraph and name and (settings.attention == "comfyui" or not torch.cuda.is_available()):
        raise InvalidSetting(
            "fullgraph",
            True,
            f"the attention that ComfyUI uses here (--use-{name}-cross-attention) asks for the free memory at each call, which "
            "no graph can contain; set fullgraph to false, or start ComfyUI with --use-pytorch-cross-attention.",
        )


def chosen_kernel(network: nn.Module, wanted: str) -> str | None:
    """The kernel in use, `comfyui` for ComfyUI's choice, CHECKPOINT for the checkpoint's; None before the first run."""
    return _chosen(network).get(wanted)


def with_attention(wanted: str, base_model, args: tuple, synchronous: bool = True) -> tuple[tuple, Callable | None]:
    """Return the arguments for `apply_model`, with an override for the kernel where that is allowed, and a function or None.

    Nothing is compiled before a kernel is chosen: if there is a function, the caller makes the call eager, and then calls the
    function, which measures the kernels. No extra call of the model is made, as another pack may count calls, or draw random
    numbers. Unless the call is `synchronous`, the worker thread first loads the kernels (cuDNN's take 1 to 2 s), and the
    function of a later call measures them.
    """
    options = args[OPTIONS_AT]
    if wanted == "comfyui" or OVERRIDE in options or not _can_measure(args[0].device):
        return args, None
    network = base_model.diffusion_model
    chosen = _chosen(network)
    if wanted == "auto" and any(getattr(module, "function", None) is not None for module in _preferences(network)):
        _keep(base_model, wanted, CHECKPOINT)  # an override would replace the checkpoint's (`wrap_attn`)
    elif chosen.get(wanted) in (None, CHECKPOINT):
        if (recalled := _recalled(wanted, network)) is not None:
            _keep(base_model, wanted, recalled)
        elif "multigpu_thread_device" in options:
            # Measuring changes PyTorch's order of kernels for the whole process, in which other threads call other GPUs.
            return (args if wanted == "auto" else _with_override(args, override_for(wanted))), None
        elif being_prepared := _being_prepared(network):
            survey, job = being_prepared[0]
            return args, lambda: _choose(base_model, survey) if synchronous or job.over else None
        else:
            survey = AttentionSurvey(wanted)
            choose = _choose if synchronous or wanted != "auto" or not _must_prepare(args[0].device) else _prepare
            return _with_override(args, survey), functools.partial(choose, base_model, survey)
    override = override_for(chosen[wanted])
    return (args if override is None else _with_override(args, override)), None


def _can_measure(device: torch.device) -> bool:
    """Whether calls can be timed. This includes AMD's cards, which PyTorch also calls cuda."""
    return device.type == "cuda"


def _recalled(wanted: str, network: nn.Module) -> str | None:
    """The kernel chosen for an earlier model of this structure: with another kernel all blocks would be compiled again."""
    if (measured := _measured.get((name_of(network), wanted))) is not None:
        return measured
    cache = current()
    choice = cache.choices(name_of(network)).get("attention") if cache is not None and _is_kept(wanted) else None
    return choice if isinstance(choice, str) and (choice == "comfyui" or override_for(choice) is not None) else None


def _is_kept(wanted: str) -> bool:
    """Whether to keep the choice on disk: not if ComfyUI uses another attention function, as few kernels are measured then."""
    return wanted == "auto" and getattr(host_attention.optimized_attention, "__name__", "") == HOST_FUNCTION


def is_being_prepared(network: nn.Module) -> bool:
    """Whether attention kernels are being loaded for the network, or are to be measured next."""
    return bool(_being_prepared(network))


def _must_prepare(device: torch.device) -> bool:
    return device.type == "cuda" and device not in _prepared


def _prepare(base_model, survey: AttentionSurvey) -> None:
    """Have the worker load kernels; a later call of the model runs `_choose`."""
    device = next((call[0].device for call in survey.calls), None)
    if device is None:  # there is nothing to measure
        return _choose(base_model, survey)

    def prepare() -> None:
        with gpu_locks[device]:  # no other work may run on a GPU during a capture
            if survey.prepare():
                _prepared.add(device)

    job = Job(weakref.ref(base_model.diffusion_model), prepare, device)
    _being_prepared(base_model.diffusion_model).append((survey, job))
    compiler.submit(job)


def _choose(base_model, survey: AttentionSurvey) -> None:
    network, cache = base_model.diffusion_model, current()
    _being_prepared(network).clear()
    if not survey.was_asked:
        _unasked(network).append(survey)
        if len(_unasked(network)) < MOST_UNASKED:
            return
    best = survey.best()
    _keep(base_model, survey.wanted, best)
    if not survey.complete:
        return
    _measured[name_of(network), survey.wanted] = best
    if cache is not None and _is_kept(survey.wanted):
        cache.remember(name_of(network), {"attention": best})


def _keep(base_model, wanted: str, choice: str) -> None:
    chosen = _chosen(base_model.diffusion_model)
    if chosen.get(wanted) != choice:
        chosen[wanted] = choice
        logger.info("%s: attention: %s", type(base_model).__name__, in_words(choice))


def _with_override(args: tuple, override) -> tuple:
    return (*args[:OPTIONS_AT], {**args[OPTIONS_AT], OVERRIDE: override}, *args[OPTIONS_AT + 1 :])
