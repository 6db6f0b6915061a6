"""Measure eager against compiled on the host's own sampling path."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import comfy.model_management
import comfy.samplers
import comfy.utils
import folder_paths
import torch

from ...benchmark.figures import BenchmarkResult, CompileCost, Timing, Trace, relative_error
from ...benchmark.step_profile import TRACE_STEPS, StepProfile, count, events_of, profile_of, step_trace, unit_for
from ...compile.binding import blocks_of
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...devices import seconds_when_done
from ...log import logger
from ...messages.recompile_log import warming, watch_of
from ...messages.report import stats_for
from ...messages.words import say
from ...settings import CompileSettings
from ...user_input import check_model, check_sampling, check_switch, check_whole
from ..graphs.policy import payoff_of
from ..model.attach import diffusion_model, eager_clone, model_name, notes_about, settings_for
from ..weights.blocks import notes_on
from .limits import limits, parts_of_model, sentences_about_model
from .sampling import STEPS as WARM_STEPS
from .sampling import labelled_latent, naming_the_size, sample, sampled_patcher
from .warmup_plan import Size

ROUNDS = 3
# The most runs of WARM_STEPS steps until attention and CUDA graphs are chosen, and everything is compiled and captured.
MOST_WARM_RUNS = 6
MAX_STEPS = 10_000
T = TypeVar("T")


def benchmark(
    patcher,
    positive: list,
    negative: list,
    size: Size,
    cfg: float,
    steps: int,
    trace: bool = False,
    latent: dict | None = None,
    vae=None,
    clip=None,
) -> BenchmarkResult | str:
    """Sample in alternating eager and compiled rounds after warming both, or say why there is nothing to compare.

    Eager is a clone of the same patcher that compiles nothing: LoRA, patches, prompts, seed, place of the weights are the same.
    A `latent` is sampled in place of `size`; `trace` keeps a trace of one step of each side in the output folder. The seconds
    of a `vae` and of a `clip` are reported beside those of the steps.

    Raises:
        InvalidSetting: an input cannot be sampled, or the model cannot take the size.
    """
    check_model(patcher)
    check_sampling(positive, negative, cfg, latent)
    check_whole("steps", steps, 1, MAX_STEPS)
    check_switch("trace", trace)
    settings = settings_for(patcher, say("nothingToCompare"))
    if isinstance(settings, str):
        return settings
    patcher = sampled_patcher(patcher, positive, negative)
    label, prepared = labelled_latent(patcher, size, latent)
    total = 3 * WARM_STEPS + 2 * ROUNDS * steps + TRACE_STEPS * (1 + trace)
    session = _Session(patcher, ((positive, negative), cfg, prepared), comfy.utils.ProgressBar(total))
    with warming(), naming_the_size(label, model_name(patcher)):
        result = _measured(session, settings, label, steps)
        skipped = session.skipped
        profile, recorded = _unless_it_fails(lambda: _profiled(session, label, trace), "a step") or (None, None)
    last = result.compiled.rounds[-1]
    step = sum(last) / (steps - skipped) if skipped else result.compiled.median
    parts = {} if profile is None else parts_of_model(patcher, settings, profile, step, steps - skipped)
    findings = sentences_about_model(patcher, settings, profile, steps, skipped)
    others = _other_seconds(vae, clip, prepared["samples"])  # measured last: loading these may unload the model
    lines = limits(parts | others, findings, step * (steps - skipped) + sum(others.values()), steps)
    watch_of(diffusion_model(patcher)).limits = lines
    notes = [*result.notes, *(["No traces were written: the log says why."] if trace and recorded is None else [])]
    return replace(result, limits=lines, trace=recorded, notes=notes)


def _choices(network, settings: CompileSettings) -> tuple:
    """State that changes until calls are warm: attention and CUDA graphs are chosen, code is made, calls are captured."""
    payoff = payoff_of(network)
    chosen = payoff.pay_to, payoff.not_from, sum(map(len, payoff.backlogs.values()))
    return stats_for(network, settings).graphs, code_of(network).eager_calls, chosen, graphs_of(network).captures


def _measured(session: _Session, settings: CompileSettings, label: str, steps: int) -> BenchmarkResult:
    patcher, (_, cfg, latent) = session.patcher, session.inputs
    shape = latent["samples"].shape
    network = diffusion_model(patcher)
    session.run("eager", WARM_STEPS)  # first: loads the weights
    before = stats_for(network, settings)
    first_steps: tuple[float, ...] = ()
    for _ in range(MOST_WARM_RUNS):
        state = _choices(network, settings)
        first_steps += session.run("compiled", WARM_STEPS)[0]
        if _choices(network, settings) == state:
            break
    warm = stats_for(network, settings)
    cost = CompileCost(warm.seconds, warm.graphs, before.graphs, warm.from_disk - before.from_disk, first_steps)

    results: dict[str, list] = {"eager": [], "compiled": []}
    for index in range(ROUNDS):  # in alternating order, so that neither side always runs on the warmer chip
        for side in ("eager", "compiled") if index % 2 == 0 else ("compiled", "eager"):
            results[side].append(session.run(side, steps))
    late = stats_for(network, settings).graphs - warm.graphs
    (eager_rounds, eager_latents), (rounds, latents) = (zip(*results[side], strict=True) for side in ("eager", "compiled"))
    return BenchmarkResult(
        model=model_name(patcher),
        device=f"{comfy.model_management.get_torch_device_name(patcher.load_device)}, PyTorch {torch.__version__}",
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
        notes=_differences(patcher, settings) + notes_about(patcher),
    )


class _Session:
    """Both ways to run one model, with the same inputs: conditioning (positive and negative), cfg, latent."""

    def __init__(self, patcher, inputs: tuple[tuple[list, list], float, dict], progress: comfy.utils.ProgressBar):
        self.patcher, self.inputs, self._progress = patcher, inputs, progress
        self._patchers = {"eager": eager_clone(patcher), "compiled": patcher}
        self.skipped = 0  # steps of the last eager run in which another node's step cache skipped the blocks

    def run(
        self, side: str, steps: int, after_step: Callable[[], None] = lambda: None
    ) -> tuple[tuple[float, ...], torch.Tensor]:
        """Sample; returns the seconds of each step, all work on the device included, and the final latent, flat."""
        patcher, device = self._patchers[side], self.patcher.load_device
        began = 0.0
        seconds: list[float] = []

        def begin() -> None:
            nonlocal began
            began = seconds_when_done(device)

        def on_step(*_: object) -> None:
            seconds.append(seconds_when_done(device) - began)
            self._progress.update(1)
            after_step()
            begin()

        sampler = comfy.samplers.sampler_object("euler")
        loop = sampler.sampler_function

        def timed_loop(*args, **kwargs):
            begin()
            return loop(*args, **kwargs)

        sampler.sampler_function = timed_loop
        sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", steps)
        # Only in eager runs: a hook on a compiled block would be part of its code.
        last_block = [*blocks_of(diffusion_model(patcher), CompileSettings())][-1:] if side == "eager" else []
        ran: set[int] = set()  # steps in which the last block ran
        hooks = [block.register_forward_hook(lambda *_: ran.add(len(seconds))) for block in last_block]
        try:
            final = sample(patcher, *self.inputs, sigmas, on_step, sampler)
        finally:
            for hook in hooks:
                hook.remove()
        if side == "eager":
            self.skipped = len(seconds) - len(ran) if ran else 0  # none ran: the model calls its blocks by other methods
        parts = final.unbind() if final.is_nested else [final]
        return tuple(seconds), torch.cat([part.flatten() for part in parts])


def _profiled(session: _Session, label: str, keep: bool) -> tuple[StepProfile | None, Trace | None]:
    """Where the time of a compiled step goes; `keep`: also trace an eager step, and keep both traces in the output folder."""
    device, output = session.patcher.load_device, folder_paths.get_output_directory()
    with tempfile.TemporaryDirectory() as temporary:
        paths = {"compiled": Path(temporary, "step.json")}
        if keep:
            name = f"torch-compile-kit/{model_name(session.patcher)}-{label.partition(' ')[0]}"
            folder, name, counter, *_ = folder_paths.get_save_image_path(name, output)
            paths = {side: Path(folder, f"{name}_{counter:05}_{side}.json") for side in ("eager", "compiled")}
        events = {}
        for side, path in paths.items():
            with step_trace(path, device) as recording:
                session.run(side, TRACE_STEPS, recording.step)
            events[side] = events_of(path)
    profile = profile_of(events["compiled"])
    if not keep:
        return profile, None
    files = tuple(path.relative_to(output).as_posix() for path in paths.values())
    return profile, Trace(unit_for(device), count(events["eager"], device), count(events["compiled"], device), files)


def _other_seconds(vae, clip, latent: torch.Tensor) -> dict[str, float]:
    """Sentence -> seconds of decoding a latent, and of encoding a prompt, with loaded models; without those that fail."""
    works = {}
    if vae is not None and not getattr(latent, "is_nested", False):
        works[say("limitVae")] = lambda: vae.decode(latent)
    if clip is not None:
        works[say("limitText")] = lambda: clip.encode_from_tokens_scheduled(clip.tokenize("a photo of a cat"))
    measured = {said: _unless_it_fails(partial(_seconds_of, work), said) for said, work in works.items()}
    return {said: seconds for said, seconds in measured.items() if seconds is not None}


def _unless_it_fails(measure: Callable[[], T], name: str) -> T | None:
    """Call `measure`; None if it fails: the rounds took long, and are reported without this measurement."""
    try:
        return measure()
    except Exception as error:  # a VAE of another model, no memory, an output folder that cannot be written
        logger.warning("not measured: %s: %s: %s", name, type(error).__name__, error)
        return None


def _seconds_of(work: Callable[[], object]) -> float:
    work()  # loads the model
    device = comfy.model_management.get_torch_device()
    began = seconds_when_done(device)
    work()
    return seconds_when_done(device) - began


def _differences(patcher, settings: CompileSettings) -> list[str]:
    """Notes on settings that differ between the two sides, or do not, where a reader could expect otherwise."""
    on = [name for name in ("allow_tf32", "cudnn_benchmark") if getattr(settings, name)]
    notes = [f"Only the compiled side has {' and '.join(on)}, as set in Torch Compile."] if on else []
    if settings.block_swap == "auto" and notes_on(patcher.model):
        notes.append("Weights that move are placed in the same way for both.")
    return notes
