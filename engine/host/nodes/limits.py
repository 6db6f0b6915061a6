"""Say what limits a workflow: what the time of a prompt goes to, the most first, and what the user can do about each part."""

from __future__ import annotations

from dataclasses import dataclass, field

import comfy.ldm.modules.attention as host_attention
from comfy.patcher_extension import WrappersMP

from ...benchmark import step_profile as profiling
from ...benchmark.figures import duration
from ...benchmark.step_profile import StepProfile
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...failures.machine import preflight_here
from ...inductor.attention_kernels import KERNELS, in_words
from ...notices.recompile_log import watch_of
from ...notices.report import given_in_words, groups_for
from ...notices.words import say
from ...options.outside import OVERRIDE
from ...ownership import named_origin, pack_of
from ...settings import CompileSettings
from ..model.attach import KEY, diffusion_model, notes_about
from ..model.attention_choice import chosen_kernel

LEAST = 0.01  # share of a prompt; what takes less is not told
GB = 1e9
_AROUND_MODEL = (WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH, WrappersMP.DIFFUSION_MODEL)


@dataclass(frozen=True)
class PromptTimes:
    """What one prompt takes, in seconds."""

    step: float  # one that no cache of steps skips
    steps: int
    skipped: int = 0  # of the steps
    others: dict[str, float] = field(default_factory=dict)  # the VAE and the text encoder, as sentences

    @property
    def total(self) -> float:
        return self.step * (self.steps - self.skipped) + sum(self.others.values())


def limits(cures: Cures, times: PromptTimes) -> list[str]:
    """A heading, a line for each part of a prompt's time, the most first, and what else was found, without a time."""
    profile, parts = cures.profile, dict(times.others)
    for kind, seconds in profile.of_step(times.step).items() if profile is not None else ():
        said = cures.of(kind, seconds)
        parts[said] = parts.get(said, 0.0) + seconds * (times.steps - times.skipped)
    told = sorted(((s, said) for said, s in parts.items() if s >= LEAST * times.total), reverse=True)
    lines = [say("limitsOf", duration(times.total), times.steps)]
    lines += [say("limit", duration(seconds), f"{seconds / times.total:.0%}", said) for seconds, said in told]
    lines += [] if profile is not None else [say("limitUnseen")]
    return [*lines, *(said for said in cures.failures.values() if not any(said in line for line in lines)), *cures.found(times)]


class Cures:
    """What can be done for a model as it has just run: another model that is loaded next may take its memory."""

    def __init__(self, patcher, settings: CompileSettings, profile: StepProfile | None):
        self._patcher, self._settings, self.profile = patcher, settings, profile
        self._loaded = patcher.loaded_size()
        self._network = diffusion_model(patcher)
        self.failures = {g.code.name: g.failure.message() for g in groups_for(self._network, settings) if g.failure}
        self._has_graphs = bool(graphs_of(self._network).graphs)
        self._obstacles = [note for note in notes_about(patcher) if note.startswith("CUDA graphs are off")]
        self._on_gpu = patcher.load_device.type != "cpu" if profile is None else profile.on_gpu

    def of(self, kind: str, seconds: float) -> str:
        """A sentence for a part of the steps that takes `seconds` of each."""
        if kind.startswith(profiling.UNCOMPILED):
            name = kind.removeprefix(profiling.UNCOMPILED)
            return say("limitUncompiled", self.failures.get(name, name))
        match kind:
            case profiling.PRODUCTS:
                return say("limitProducts")
            case profiling.CONVOLUTIONS:
                return say("limitConvolutions")
            case profiling.FUSED:
                return say("limitFused")
            case profiling.ATTENTION:
                return self._attention()
            case profiling.WAITING:
                return self._waiting()
            case profiling.TRANSFERS:
                copied = self.profile.transferred if self.profile is not None else 0
                gigabytes = [f"{size / GB:.1f}" for size in (copied, self._loaded, self._patcher.model_size())]
                return say("limitTransfers", gigabytes[0], duration(seconds), *gigabytes[1:])
        return say("limitOther")

    def found(self, times: PromptTimes) -> list[str]:
        """What was found beside the parts of a step."""
        lines = []
        if self.profile is not None:
            share = f"{self.profile.compiled_share:.0%}"
            lines.append(say("limitGraphs", share) if self._has_graphs else say("limitCompiled", share))
        lines += given_in_words(code_of(self._network).taken)
        wrappers = [item for kind in _AROUND_MODEL for item in self._patcher.wrappers.get(kind, {}).items()]
        others = [function for key, functions in wrappers if key != KEY for function in functions]
        named = map(named_origin, (*others, self._patcher.model_options.get("model_function_wrapper")))
        caches = list(dict.fromkeys(filter(None, named)))
        if times.skipped or any("cache" in name.lower() for name in caches):
            lines.append(say("limitStepCache", ", ".join(caches), times.skipped, times.steps))
        if (pack := watch_of(self._network).foreign) is not None:
            lines.append(say("limitWrapped", pack))
        _, misfits = preflight_here(self._patcher.load_device.type != "cpu")
        return lines + [say("inEnglish", misfit) for misfit in misfits]

    def _attention(self) -> str:
        override = self._patcher.model_options.get("transformer_options", {}).get(OVERRIDE)
        replaced = override or host_attention.optimized_attention
        chosen = chosen_kernel(self._network, self._settings.attention)
        if override is not None or pack_of(replaced) is not None:
            return say("limitAttentionNode", named_origin(replaced))
        if chosen in KERNELS:
            return say("limitAttentionOurs", in_words(chosen))
        name = getattr(replaced, "__name__", "")
        if self._settings.attention == "comfyui" and self._on_gpu:
            return say("limitAttentionSet", name)
        return say("limitAttentionHost", name)

    def _waiting(self) -> str:
        if not self._on_gpu:
            return say("limitPython")
        if self._has_graphs:
            return say("limitWaiting")
        if not self._settings.may_have_graphs:
            return say("limitWaitingMode")
        return say("limitWaitingWhy", self._obstacles[0]) if self._obstacles else say("limitWaitingReduce")
