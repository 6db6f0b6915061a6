"""Say what limits a workflow: where the time of a prompt goes, largest part first, and what the user can do about each part."""

from __future__ import annotations

import comfy.ldm.modules.attention as host_attention
from comfy.patcher_extension import WrappersMP

from ...attention_kernels import KERNELS, in_words
from ...benchmark import step_profile as profiling
from ...benchmark.figures import duration
from ...benchmark.step_profile import StepProfile
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...failures.machine import preflight_here
from ...messages.recompile_log import watch_of
from ...messages.report import given_in_words
from ...messages.words import say
from ...ownership import named_origin, pack_of
from ...settings import CompileSettings
from ...transformer_options.outside import OVERRIDE
from ..adapter import KEY
from ..model.attach import diffusion_model, notes_about
from ..model.attention_choice import chosen_kernel

LEAST = 0.01  # share of a prompt's time; smaller parts are left out
GB = 1e9
_AROUND_MODEL = (WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH, WrappersMP.DIFFUSION_MODEL)


def limits(parts: dict[str, float], findings: list[str], total: float, steps: int) -> list[str]:
    """A heading, a line for each part of a prompt's time, largest first, and findings without a time.

    Args:
        parts: sentence -> seconds, of `parts_of_model` and of other models.
        findings: sentences; those that a part's line repeats are left out.
        total: seconds of the prompt.
    """
    told = sorted(((seconds, said) for said, seconds in parts.items() if seconds >= LEAST * total), reverse=True)
    lines = [say("limitsOf", duration(total), steps)]
    lines += [say("limit", duration(seconds), f"{seconds / total:.0%}", said) for seconds, said in told]
    return [*lines, *(said for said in findings if not any(said in line for line in lines))]


def parts_of_model(patcher, settings: CompileSettings, profile: StepProfile, step: float, steps: int) -> dict[str, float]:
    """Sentence -> seconds, of `steps` steps that take `step` seconds each."""
    parts: dict[str, float] = {}
    for kind, seconds in profile.of_step(step).items():
        said = _sentence(patcher, settings, profile, kind, seconds)
        parts[said] = parts.get(said, 0.0) + seconds * steps
    return parts


def _sentence(patcher, settings: CompileSettings, profile: StepProfile, kind: str, seconds: float) -> str:
    """Say what the part `kind` of a step is, which takes `seconds` of each step, and what can be done about it."""
    network = diffusion_model(patcher)
    if kind.startswith(profiling.UNCOMPILED):
        name = kind.removeprefix(profiling.UNCOMPILED)
        return say("limitUncompiled", _failures(network, settings).get(name, name))
    if kind == profiling.ATTENTION:
        return _attention(patcher, network, settings, profile.on_gpu)
    if kind == profiling.TRANSFERS:
        copied, loaded, whole = (
            f"{size / GB:.1f}" for size in (profile.transferred, patcher.loaded_size(), patcher.model_size())
        )
        return say("limitTransfers", copied, duration(seconds), loaded, whole)
    if kind != profiling.WAITING:
        floors = {
            profiling.PRODUCTS: say("limitProducts"),
            profiling.CONVOLUTIONS: say("limitConvolutions"),
            profiling.FUSED: say("limitFused"),
        }
        return floors.get(kind, say("limitOther"))
    if not profile.on_gpu:
        return say("limitPython")
    if _runs_graphs(network):
        return say("limitWaiting")
    if not settings.may_have_graphs:
        return say("limitWaitingMode")
    obstacle = next((note for note in notes_about(patcher) if note.startswith("CUDA graphs are off")), None)
    return say("limitWaitingReduce") if obstacle is None else say("limitWaitingWhy", obstacle)


def _runs_graphs(network) -> bool:
    """Whether steps replay CUDA graphs. Not while another node takes part: the graphs are then kept for runs without it."""
    return bool(graphs_of(network).graphs) and watch_of(network).foreign is None


def _attention(patcher, network, settings: CompileSettings, on_gpu: bool) -> str:
    override = patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
    replaced = override or host_attention.optimized_attention
    chosen = chosen_kernel(network, settings.attention)
    if override is not None or pack_of(replaced) is not None:
        return say("limitAttentionNode", named_origin(replaced))
    if chosen in KERNELS:
        return say("limitAttentionOurs", in_words(chosen))
    name = getattr(replaced, "__name__", "")
    is_set = settings.attention == "comfyui" and on_gpu
    return say("limitAttentionSet", name) if is_set else say("limitAttentionHost", name)


def _failures(network, settings: CompileSettings) -> dict[str, str]:
    return {group.code.name: group.failure.message() for group in code_of(network).groups_of(settings) if group.failure}


def sentences_about_model(
    patcher, settings: CompileSettings, profile: StepProfile | None, steps: int, skipped: int
) -> list[str]:
    """Sentences about a model beside the parts of a step; a step cache skipped the blocks in `skipped` of `steps` steps."""
    network = diffusion_model(patcher)
    findings = [*([say("limitUnseen")] if profile is None else []), *_failures(network, settings).values()]
    if profile is not None:
        share = f"{profile.compiled_share:.0%}"
        findings.append(say("limitGraphs", share) if _runs_graphs(network) else say("limitCompiled", share))
    findings += given_in_words(code_of(network).taken)
    wrappers = [item for kind in _AROUND_MODEL for item in patcher.wrappers.get(kind, {}).items()]
    others = [function for key, functions in wrappers if key != KEY for function in functions]
    named = map(named_origin, (*others, patcher.model_options.get("model_function_wrapper")))
    around = list(dict.fromkeys(filter(None, named)))
    caches = [name for name in around if "cache" in name.lower()]
    if skipped or caches:
        findings.append(say("limitStepCache", ", ".join(caches or around), skipped, steps))
    if (pack := watch_of(network).foreign) is not None:
        findings.append(say("limitWrapped", pack))
    _, misfits = preflight_here(patcher.load_device.type != "cpu")
    return findings + [say("inEnglish", misfit) for misfit in misfits]
