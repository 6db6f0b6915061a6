"""Warm up: compile for the chosen sizes before the real work starts."""

from __future__ import annotations

import time

import comfy.utils
import torch

from ..report import CompileReport, WarmedSize, kinds_for, stats_for
from ..warmup_plan import Size
from ..watch import warming
from .attachment import attached_settings, compile_plan, diffusion_model, model_name, notes_about
from .sampling import STEPS, labelled_latent, naming_the_size, sample_once


def warm_up(patcher, positive: list, negative: list, cfg: float, sizes: list[Size], latent: dict | None = None) -> str:
    """Run the sampler at every size, and report what was compiled.

    Args:
        patcher: a model that went through the Torch Compile Model node.
        positive, negative: conditioning as the sampler gets it.
        cfg: as in the sampler; 1.0 leaves the negative out.
        sizes: what to warm; the first is replaced by `latent` if given.

    Returns:
        The report.

    Raises:
        InvalidSetting: the model cannot take a size.
    """
    settings = attached_settings(patcher)
    if settings is None:
        return "Nothing to warm up: put Torch Compile Model (backend other than none) before this node."
    latents = _latents(patcher, sizes, latent)
    model = diffusion_model(patcher)
    report = CompileReport(model_name(patcher), settings, compile_plan(patcher, settings), [])
    progress = comfy.utils.ProgressBar(len(latents) * STEPS)
    for index, (label, samples) in enumerate(latents):
        before, began = stats_for(model, settings).copy(), time.perf_counter()
        with warming(), naming_the_size(label, report.model_name):
            sample_once(
                patcher,
                positive,
                negative,
                cfg,
                samples,
                on_step=lambda step, done=index * STEPS: progress.update_absolute(done + step),
            )
        report.sizes.append(WarmedSize(label, time.perf_counter() - began, stats_for(model, settings) - before))
    report.kinds = kinds_for(model, settings)
    report.notes = notes_about(patcher)
    return report.text()


def _latents(patcher, sizes: list[Size], latent: dict | None) -> list[tuple[str, torch.Tensor]]:
    """All latents before the first run, so that a wrong size costs no waiting."""
    return [labelled_latent(patcher, size, latent if index == 0 else None) for index, size in enumerate(sizes)]
