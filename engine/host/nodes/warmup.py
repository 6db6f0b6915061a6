"""Warm up: compile for the chosen sizes before the real work starts."""

import time
from collections.abc import Callable

from ...compile.registry import code_of
from ...messages.recompile_log import warming, watch_of
from ...messages.report import CompileReport, WarmedSize, groups_for, stats_for
from ...messages.words import say, say_in_english
from ...settings import CompileSettings
from ...user_input import check_model, check_sampling
from ..adapter import is_dynamic
from ..model.attach import Nothing, compile_plan, diffusion_model, model_name, notes_about, settings_for
from ..model.controlnet import controls_in
from ..model.network_calls import raise_if_interrupted
from .progress import WarmupProgress
from .sampling import STEPS, labelled_latent, latent_shape, naming_the_size, ranges_of, sample_once
from .warmup_plan import MemoryPeaks, Size


def warm_up(
    patcher,
    positive: list,
    negative: list,
    cfg: float,
    sizes: list[Size],
    latent: dict | None = None,
    node_id: str | None = None,
) -> str:
    """Run the sampler at every size, and report what was compiled; `latent` replaces the first size.

    Raises:
        InvalidSetting: an input cannot be sampled, or the model cannot take a size.
    """
    check_model(patcher)
    check_sampling(positive, negative, cfg, latent)
    settings = settings_for(patcher, Nothing(say("nothingToWarm"), say_in_english("nothingToWarm")))
    if isinstance(settings, Nothing):
        return settings.text
    for index, size in enumerate(sizes):  # before the first run, so that a wrong size costs no waiting
        if index or latent is None:
            latent_shape(patcher, size, is_extra=index > 0)
    return _Warmup(patcher, settings, (positive, negative), cfg).run(sizes, latent, node_id)


class _Warmup:
    """Run the node once."""

    def __init__(self, patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float):
        self.patcher, self.settings, self.conditioning, self.cfg = patcher, settings, conditioning, cfg
        self.model = diffusion_model(patcher)
        self.code = code_of(self.model)
        self.report = CompileReport(model_name(patcher), settings, compile_plan(patcher, settings), [])
        self.apart: set[tuple] = set()  # as `ModelCode.ran_apart`, in this warmup

    def run(self, sizes: list[Size], latent: dict | None, node_id: str | None) -> str:
        paged = self.patcher.loaded_size if is_dynamic(self.patcher) else int
        memory = MemoryPeaks(self.patcher.load_device, paged)
        in_each = STEPS * ranges_of(self.conditioning)
        classes = list(dict.fromkeys(block.class_name for block in self.report.plan.blocks))
        mask = latent.get("noise_mask") if latent else None
        with WarmupProgress(len(sizes), in_each, classes, self.settings.backend == "inductor", node_id) as progress:
            for index, size in enumerate(sizes):  # many large latents at once are beyond memory
                label, prepared = labelled_latent(self.patcher, size, latent if index == 0 else None)
                raise_if_interrupted()
                progress.begin(label, index)
                with warming(), naming_the_size(label, self.report.model_name):
                    self._at_size(label, {**prepared, "noise_mask": mask}, progress.step)
                progress.end(index)
        self.report.groups, self.report.parts = groups_for(self.model, self.settings), self.code.parts
        self.report.taken = self.code.taken
        self.report.notes += notes_about(self.patcher)
        controls = controls_in([entry for prompts in self.conditioning for entry in prompts])
        self.report.notes += [line for control in controls for line in control.notes()]
        if any(size.added.graphs for size in self.report.sizes):
            self.report.notes.append(memory.text())
        self.report.notes += [say("outside", sentence) for sentence in watch_of(self.model).notices]
        return self.report.text()

    def _at_size(self, label: str, latent: dict, on_step: Callable[[], None]) -> None:
        began, before = time.perf_counter(), stats_for(self.model, self.settings)
        uncompiled = self.code.eager_calls
        joined = sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step)
        if self.code.eager_calls != uncompiled:  # the attention was measured
            joined = sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step)
        # With code for all sizes, one stands for all; where nothing was compiled, so does one of an earlier warmup.
        kind = self.settings.settings_key(), latent["samples"].shape[0] == 1
        is_warm = kind in self.code.ran_apart and stats_for(self.model, self.settings).graphs == before.graphs
        if joined and kind not in self.apart and not is_warm:
            sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step, each_prompt_alone=True)
            if self.settings.dynamic != "false":
                self.apart.add(kind)
                self.code.ran_apart.add(kind)
        added = stats_for(self.model, self.settings) - before
        self.report.sizes.append(WarmedSize(label, time.perf_counter() - began, added))
