"""Warm up: compile for the chosen sizes before the real work starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ...compile.binding import modules_at
from ...compile.registry import code_of
from ...notices.recompile_log import warming, watch_of
from ...notices.report import CompileReport, WarmedSize, groups_for, stats_for
from ...notices.words import say
from ...settings import CompileSettings
from ...user_input import check_model, check_sampling
from ...warmup.memory import MemoryPeaks
from ...warmup.plan import Size
from ..model.attach import (
    attached_settings,
    compile_plan,
    diffusion_model,
    model_name,
    notes_about,
)
from ..model.controlnet import controls_in
from ..model.network_calls import raise_if_interrupted
from .fingerprint import fingerprint
from .progress import WarmupProgress
from .sampling import (
    STEPS,
    labelled_latent,
    latent_shape,
    naming_the_size,
    ranges_of,
    sample_once,
)


def warm_up(
    patcher,
    positive: list,
    negative: list,
    cfg: float,
    sizes: list[Size],
    latent: dict | None = None,
    node_id: str | None = None,
) -> str:
    """Run the sampler at every size that is not warm yet, and report what was compiled.

    Args:
        patcher: a model that went through the Torch Compile Model node.
        positive, negative: conditioning as the sampler gets it.
        cfg: as in the sampler; 1.0 leaves the negative out.
        sizes: what to warm; the first is replaced by `latent` if given.
        node_id: of the node that shows the progress.

    Returns:
        The report.

    Raises:
        InvalidSetting: an input is nothing that can be sampled, or the model cannot take a size.
    """
    check_model(patcher)
    check_sampling(positive, negative, cfg, latent)
    settings = attached_settings(patcher)
    if settings is None:
        return "Nothing to warm up: put Torch Compile Model (backend other than none) before this node."
    latents = _Latents(patcher, sizes, latent)
    return _Warmup(patcher, settings, (positive, negative), cfg).run(latents, node_id)


# Two lengths of a prompt have run, and the second needed no code of its own: a third needs none either.
SETTLED = "any length"


class _Warmup:
    """One execution of the node."""

    def __init__(self, patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float):
        self.patcher, self.settings, self.conditioning, self.cfg = patcher, settings, conditioning, cfg
        self.model = diffusion_model(patcher)
        self.code = code_of(self.model)
        plan = compile_plan(patcher, settings)
        self.blocks = list(modules_at(self.model, plan))
        self.report = CompileReport(model_name(patcher), settings, plan, [])
        # For which kinds of batch (of one, of more) prompt and negative have been run apart from each other.
        self.apart: set[bool] = set()
        self.steps = STEPS

    def run(self, latents: _Latents, node_id: str | None) -> str:
        paged = self.patcher.loaded_size if getattr(self.patcher, "is_dynamic", bool)() else int
        memory = MemoryPeaks(self.patcher.load_device, paged)
        in_each = STEPS * ranges_of(self.conditioning)
        classes = list(dict.fromkeys(block.class_name for block in self.report.plan.blocks))
        with WarmupProgress(len(latents), in_each, classes, self.settings.backend == "inductor", node_id) as progress:
            for index, (label, latent) in enumerate(latents):
                raise_if_interrupted()
                progress.begin(label, index)
                with warming():
                    self._at_size(label, latent, progress.step)
                progress.end(index)
        self.report.groups, self.report.parts = groups_for(self.model, self.settings), self.code.parts
        self.report.notes += notes_about(self.patcher)
        controls = controls_in([entry for prompts in self.conditioning for entry in prompts])
        self.report.notes += [line for control in controls for line in control.notes()]
        if any(size.added.graphs for size in self.report.sizes):
            self.report.notes.append(memory.text())
        self.report.notes += [say("outside", sentence) for sentence in watch_of(self.model).notices]
        return self.report.text()

    def _at_size(self, label: str, latent: dict, on_step: Callable[[], None]) -> None:
        with naming_the_size(label, self.report.model_name):
            self._unless_known(label, latent, self.conditioning, lambda: self._sample_at(latent, on_step))
        self.apart.add(latent["samples"].shape[0] == 1)

    def _sample_at(self, latent: dict, on_step: Callable[[], None]) -> None:
        calls = sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step)
        if calls.early:  # else it says nothing about whether the model's second call is another
            self.steps = STEPS if calls.late else 1
        # With shared code one size stands for all.
        if calls.joined and (self.settings.dynamic == "false" or (latent["samples"].shape[0] == 1) not in self.apart):
            sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step, each_prompt_alone=True, steps=self.steps)

    def _unless_known(self, label: str, latent: dict, conditioning: tuple[list, list], run: Callable[[], None]) -> None:
        """`run`, unless it has run before and all that its code depends on is as it was; a line for the report."""
        began, before = time.perf_counter(), stats_for(self.model, self.settings).copy()
        run_described = self.patcher, self.settings, conditioning, self.cfg, latent
        what, any_length = fingerprint(*run_described), fingerprint(*run_described, any_length=True)
        warm, groups = self.code.warm, groups_for(self.model, self.settings)
        # Not where code depends on where the weights are, or where unloading the model drops its CUDA graphs.
        known = (
            self.settings.block_swap != "eager linears"
            and not self.settings.wants_graphs
            and self.code.unchanged(self.blocks, self.settings)
            and (warm.holds(what, groups) or warm.holds((any_length, SETTLED), groups))
        )
        if not known:
            ran_with_another_length = self.settings.dynamic != "false" and warm.holds(any_length, groups)
            run()
            groups = groups_for(self.model, self.settings)
            warm.add(what, groups)
            warm.add(any_length, groups)
            if ran_with_another_length and not (stats_for(self.model, self.settings) - before).graphs:
                warm.add((any_length, SETTLED), groups)
        added = stats_for(self.model, self.settings) - before
        self.report.sizes.append(WarmedSize(label, time.perf_counter() - began, added, skipped=known))


class _Latents:
    """The latents to sample, with their names: each is made when it is its turn, since many large ones are beyond memory.

    Raises:
        InvalidSetting: the model cannot make one of the sizes; before the first run, so that it costs no waiting.
    """

    def __init__(self, patcher, sizes: list[Size], latent: dict | None):
        for size in sizes[latent is not None :]:
            latent_shape(patcher, size)
        self._patcher, self._sizes, self._latent = patcher, sizes, latent

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[tuple[str, dict]]:
        mask = self._latent.get("noise_mask") if self._latent else None
        for index, size in enumerate(self._sizes):
            label, prepared = labelled_latent(self._patcher, size, self._latent if index == 0 else None)
            yield label, {**prepared, "noise_mask": mask}
