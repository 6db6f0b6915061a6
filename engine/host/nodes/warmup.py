"""Warm up: compile for the chosen sizes before the real work starts."""

import functools
import time
from collections.abc import Callable

from ...compile.registry import code_of
from ...messages.recompile_log import warming, watch_of
from ...messages.report import CompileReport, WarmedSize, stats_for
from ...messages.words import say
from ...settings import CompileSettings
from ...user_input import check_model, check_sampling
from ..graphs.policy import MEASURED_CALLS, payoff_of
from ..model.attach import compile_plan, diffusion_model, model_name, notes_about, settings_for
from ..model.controlnet import controls_in
from ..model.network_calls import raise_if_interrupted
from .progress import WarmupProgress
from .sampling import STEPS, labelled_latent, latent_shape, naming_the_size, ranges_of, sample_once, sampled_patcher
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
    settings = settings_for(patcher, say("nothingToWarm"))
    if isinstance(settings, str):
        return settings
    for index, size in enumerate(sizes):  # before the first run, so that a wrong size costs no waiting
        if index or latent is None:
            latent_shape(patcher, size, is_extra=index > 0)
    patcher = sampled_patcher(patcher, positive, negative)
    network, conditioning, name = diffusion_model(patcher), (positive, negative), model_name(patcher)
    code, plan = code_of(network), compile_plan(patcher, settings)
    memory = MemoryPeaks(patcher.load_device, patcher.loaded_size if patcher.is_dynamic() else int)
    steps, kinds = STEPS * ranges_of(conditioning), len({block.class_name for block in plan.blocks})
    warmed: list[WarmedSize] = []
    with WarmupProgress(len(sizes), steps, kinds, settings.backend == "inductor", node_id) as progress:
        for index, size in enumerate(sizes):  # a latent at a time: many large ones would not fit in memory
            label, prepared = labelled_latent(patcher, size, latent if index == 0 else None, latent)
            if latent is not None:
                prepared["noise_mask"] = latent.get("noise_mask")
            raise_if_interrupted()
            progress.begin(label, index)
            began, before = time.perf_counter(), stats_for(network, settings)
            with warming(), naming_the_size(label, name):
                _sample(patcher, settings, conditioning, cfg, prepared, progress.step)
            warmed.append(WarmedSize(label, time.perf_counter() - began, stats_for(network, settings) - before))
    controls = controls_in([entry for prompts in conditioning for entry in prompts])
    notes = [*notes_about(patcher), *(line for control in controls for line in control.notes())]
    if any(size.added.graphs for size in warmed):
        notes.append(memory.text())
    notes += [say("outside", sentence) for sentence in watch_of(network).notices]
    return CompileReport(name, settings, plan, code.groups_of(settings), warmed, notes, code.parts, code.taken).text()


def _sample(
    patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float, latent: dict, on_step: Callable[[], None]
) -> None:
    """Run the sampler. Where several prompts may run as one batch, run it once more with each prompt alone."""
    run = functools.partial(sample_once, patcher, conditioning, cfg, latent, on_step)
    network = diffusion_model(patcher)
    code, graphs = code_of(network), stats_for(network, settings).graphs
    uncompiled = code.eager_calls
    run()
    if code.eager_calls != uncompiled:  # the attention was measured
        run()
    for _ in range(MEASURED_CALLS):
        if payoff_of(network).backlogs:  # whether CUDA graphs pay is still being measured
            run()
    joined = any(call.prompts_per_call > 1 for call in watch_of(network).compiled_for.get(settings.settings_key(), ()))
    kind = settings.settings_key(), latent["samples"].shape[0] == 1
    # If code is for all sizes, one run with each prompt alone is enough, unless something new was compiled.
    if joined and (kind not in code.ran_apart or stats_for(network, settings).graphs != graphs):
        run(each_prompt_alone=True)
        if settings.dynamic != "false":
            code.ran_apart.add(kind)
