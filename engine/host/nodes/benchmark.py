"""Measure eager against compiled on the host's own sampling path."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.samplers
import comfy.utils
import folder_paths
import torch

from ...benchmark.figures import (
    TRACE_STEPS,
    BenchmarkResult,
    CompileCost,
    Timing,
    Trace,
    count,
    relative_error,
    step_trace,
    unit_for,
)
from ...notices.recompile_log import warming
from ...notices.report import groups_for, stats_for
from ...settings import CompileSettings
from ...torch_compat import private
from ...user_input import check_model, check_sampling, check_switch, check_whole
from ..model.attach import attached_settings, diffusion_model, eager_clone, model_name, notes_about
from ..weights.blocks import notes_on
from .sampling import STEPS as WARM_STEPS
from .sampling import labelled_latent, naming_the_size, sample
from .warmup_plan import Size

ROUNDS = 3
MAX_STEPS = 10_000
NOT_COMPILED = "Nothing to compare: put Torch Compile Model (backend other than none) before this node."


def benchmark(
    patcher, positive: list, negative: list, size: Size, cfg: float, steps: int, trace: bool = False, latent: dict | None = None
) -> BenchmarkResult | None:
    """Sample in alternating eager and compiled rounds after warming both; None if the model is not compiled.

    Eager is a clone of the same patcher that compiles nothing: LoRA, patches, prompts, seed, place of the weights are the same.
    A `latent` is sampled in place of `size`; `trace` records one step of each into the output folder.

    Raises:
        InvalidSetting: an input cannot be sampled, or the model cannot take the size.
    """
    check_model(patcher)
    check_sampling(positive, negative, cfg, latent)
    check_whole("steps", steps, 1, MAX_STEPS)
    check_switch("trace", trace)
    settings = attached_settings(patcher)
    if settings is None:
        return None
    label, prepared = labelled_latent(patcher, size, latent)
    total = 2 * WARM_STEPS + 2 * ROUNDS * steps + 2 * TRACE_STEPS * trace
    session = _Session(patcher, ((positive, negative), cfg, prepared), comfy.utils.ProgressBar(total))
    with warming(), naming_the_size(label, model_name(patcher)):
        return _measured(session, settings, label, steps, trace)


def _measured(session: _Session, settings: CompileSettings, label: str, steps: int, trace: bool) -> BenchmarkResult:
    patcher, (_, cfg, latent) = session.patcher, session.inputs
    shape = latent["samples"].shape
    network = diffusion_model(patcher)
    session.run("eager", WARM_STEPS)  # first: loads the weights
    before, hits = stats_for(network, settings), _hits()
    first_steps, _ = session.run("compiled", WARM_STEPS)
    warm = stats_for(network, settings)
    from_disk = _hits() - hits if warm.graphs > before.graphs else 0
    cost = CompileCost(warm.seconds, warm.graphs, before.graphs, from_disk, first_steps)

    results: dict[str, list] = {"eager": [], "compiled": []}
    for index in range(ROUNDS):  # turn by turn, so that neither side always runs on the warmer chip
        for side in ("eager", "compiled") if index % 2 == 0 else ("compiled", "eager"):
            results[side].append(session.run(side, steps))
    late = stats_for(network, settings).graphs - warm.graphs
    (eager_rounds, eager_latents), (rounds, latents) = (zip(*results[side], strict=True) for side in ("eager", "compiled"))
    failures = list(dict.fromkeys(group.failure.message() for group in groups_for(network, settings) if group.failure))
    recorded = _traced(session, label) if trace else None
    return BenchmarkResult(
        model=model_name(patcher),
        device=_device_name(patcher.load_device),
        settings=settings.describe(),
        size=label,
        steps=steps,
        cfg=cfg,
        batch=shape[0],
        eager=Timing(eager_rounds),
        compiled=Timing(rounds),
        cost=cost,
        error=relative_error(latents[-1], eager_latents[-1]),
        repeat_error=relative_error(eager_latents[0], eager_latents[-1]),
        late_graphs=late,
        video=len(shape) == 5 and shape[2] > 1,
        trace=recorded,
        notes=_differences(patcher, settings) + notes_about(patcher) + failures,
    )


class _Session:
    """Both ways to run one model, with the same inputs: conditioning (positive and negative), cfg, latent."""

    def __init__(self, patcher, inputs: tuple[tuple[list, list], float, dict], progress: comfy.utils.ProgressBar):
        self.patcher, self.inputs, self._progress = patcher, inputs, progress
        self._patchers = {"eager": eager_clone(patcher), "compiled": patcher}

    def run(
        self, side: str, steps: int, after_step: Callable[[], None] | None = None
    ) -> tuple[tuple[float, ...], torch.Tensor]:
        """Seconds of each step, all work on the device included, and the final latent, flat."""
        device = self.patcher.load_device
        stamps: list[float] = []
        seconds: list[float] = []
        sampler = comfy.samplers.sampler_object("euler")
        loop = sampler.sampler_function

        def timed_loop(*args, **kwargs):
            _synchronize(device)
            stamps.append(time.perf_counter())
            return loop(*args, **kwargs)

        def on_step(*_: object) -> None:
            _synchronize(device)
            seconds.append(time.perf_counter() - stamps[-1])
            self._progress.update(1)
            if after_step is not None:
                after_step()
            stamps.append(time.perf_counter())

        sampler.sampler_function = timed_loop
        patcher = self._patchers[side]
        sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", steps)
        final = sample(patcher, *self.inputs, sigmas, on_step, sampler)
        parts = final.unbind() if final.is_nested else [final]
        return tuple(seconds), torch.cat([part.flatten() for part in parts])


def _traced(session: _Session, label: str) -> Trace:
    device = session.patcher.load_device
    name = f"{model_name(session.patcher)}-{label.partition(' ')[0]}"
    output = folder_paths.get_output_directory()
    folder, name, counter, *_ = folder_paths.get_save_image_path(f"torch-compile-kit/{name}", output)
    paths = [Path(folder) / f"{name}_{counter:05}_{side}.json" for side in ("eager", "compiled")]
    for side, path in zip(("eager", "compiled"), paths, strict=True):
        with step_trace(path, device) as recording:
            session.run(side, TRACE_STEPS, recording.step)
    eager, compiled = (count(path, device) for path in paths)
    return Trace(unit_for(device), eager, compiled, tuple(path.relative_to(output).as_posix() for path in paths))


def _differences(patcher, settings: CompileSettings) -> list[str]:
    """Settings that differ between the two sides or not, where a reader could expect otherwise."""
    on = [name for name in ("allow_tf32", "cudnn_benchmark") if getattr(settings, name)]
    notes = [f"Only the compiled side has {' and '.join(on)}, as set in Torch Compile Model."] if on else []
    if settings.block_swap == "auto" and notes_on(patcher.model):
        notes.append("Weights that move are placed in the same way for both, that of Torch Compile Model.")
    return notes


def _hits() -> int:
    return private.counters["inductor"]["fxgraph_cache_hit"]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif hasattr(torch, device.type):
        getattr(torch, device.type).synchronize()


def _device_name(device: torch.device) -> str:
    """For example `NVIDIA H200, PyTorch 2.11.0+cu130`."""
    backend: Any = getattr(torch, device.type, None)
    name = backend.get_device_name(device) if hasattr(backend, "get_device_name") else device.type
    if device.type == "cpu":
        name = f"CPU ({platform.machine()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)})"
    return f"{name}, PyTorch {torch.__version__}"
