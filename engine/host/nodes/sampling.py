"""Run the host's own sampling path for a size, as a real generation does."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import comfy.model_management
import comfy.sample
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ...errors import InvalidSetting, TorchCompileKitError
from ...failures.describe import never_swallowed
from .warmup_plan import GIB, Size

# Some models keep state that only the second call uses (KV caches), so one call at a shape is not enough.
STEPS = 2
KEY = "torch-compile-kit.warmup"


def sampled_patcher(patcher, *prompts: list):
    """The patcher that the host samples in place of `patcher`: for hooks in prompts (LoRA) one without dynamic VRAM, whose
    model is loaded once more (comfy/samplers.py, `CFGGuider.inner_set_conds`)."""
    has_hooks = any(map(comfy.sampler_helpers.cond_has_hooks, prompts))
    return patcher.get_non_dynamic_delegate() if has_hooks and patcher.is_dynamic() else patcher


def latent_shape(patcher, size: Size, is_extra: bool = False) -> list[int]:
    """The shape of a latent in the model's format: `[batch, channels, height, width]`, with frames before height for video.

    Args:
        is_extra: the size is one of extra_sizes, which an error then names.

    Raises:
        InvalidSetting: the model cannot make that size, or its latent does not fit into memory.
    """

    def refusal(name: str, value: object, cure: str) -> InvalidSetting:
        return InvalidSetting("extra_sizes", size.entry(), cure) if is_extra else InvalidSetting(name, value, cure)

    latent_format = patcher.get_model_object("latent_format")
    ratio = latent_format.spacial_downscale_ratio
    dimensions = latent_format.latent_dimensions
    if dimensions == 1:
        raise refusal("width", size.width, "this model makes sound, not images; connect latent_image instead.")
    for name in ("width", "height"):
        value = getattr(size, name)
        if value < ratio:
            raise refusal(name, value, f"too small for this model; use at least {ratio} pixels.")
    shape = [size.batch, latent_format.latent_channels, size.height // ratio, size.width // ratio]
    if dimensions == 3:
        shape.insert(2, (size.length - 1) // latent_format.temporal_downscale_ratio + 1)
    elif size.length > 1:
        cure = f"write {replace(size, length=1).entry()}" if is_extra else "set length to 1"
        raise refusal("length", size.length, f"this model makes images, not video; {cure}.")
    device = comfy.model_management.intermediate_device()
    needed, total = 4 * math.prod(shape), comfy.model_management.get_total_memory(device)
    if needed > total:  # with overcommitted memory the system would end the process
        raise InvalidSetting(
            "size", size.label(), f"its latent alone takes {needed / GIB:,.0f} GiB; {device} has {total / GIB:,.0f} GiB."
        )
    return shape


def labelled_latent(patcher, size: Size, latent: dict | None = None, like: dict | None = None) -> tuple[str, dict]:
    """Return a name for reports, and the latent to sample (`samples`; `noise_mask`, which may be None).

    A `latent` is sampled in place of `size`, fitted to the model as by the host's KSampler (common_ksampler). Without `latent`,
    parts beside the video (LTX-2's sound) are as in `like`: without sound the model's blocks run other code.

    Raises:
        InvalidSetting: the model cannot make that size.
    """
    latent_format = patcher.get_model_object("latent_format")
    ratio = latent_format.spacial_downscale_ratio
    if latent is None:  # sizes are rounded down to a whole latent, as by the host's nodes
        shape = latent_shape(patcher, size)
        length = (shape[2] - 1) * latent_format.temporal_downscale_ratio + 1 if len(shape) == 5 else 1
        sampled = Size(shape[-1] * ratio, shape[-2] * ratio, length, size.batch)
        label = sampled.label() if sampled == size else f"{sampled.label()} (rounded from {size.label().partition(' ')[0]})"
        samples = torch.zeros(shape, device=comfy.model_management.intermediate_device())
        if like is not None and getattr(like["samples"], "is_nested", False):
            _video, *others = like["samples"].unbind()
            samples = type(like["samples"])([samples, *(part.new_zeros(size.batch, *part.shape[1:]) for part in others)])
        return label, {"samples": samples, "noise_mask": None}
    ratios = latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    samples = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"], *ratios)
    sides = samples.shape[:-3:-1] if len(samples.shape) >= 4 else ()
    label = "x".join(str(side * ratio) for side in sides) or "latent_image"
    return f"{label} batch {samples.shape[0]} (latent_image)", {"samples": samples, "noise_mask": latent.get("noise_mask")}


@contextmanager
def naming_the_size(label: str, model_name: str) -> Iterator[None]:
    """A context that turns errors of the model into an InvalidSetting with the size; running out of memory stays as it is."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, TorchCompileKitError) or never_swallowed(error):
            raise
        if "mat1 and mat2" in str(error):
            asked = "Do positive and negative come from this model's text encoder?"
            raise TorchCompileKitError(f"The conditioning does not fit {model_name} ({error}). {asked}") from error
        raise InvalidSetting("size", label, f"{model_name} cannot sample it: {error}") from error


def sample(
    patcher,
    conditioning: tuple[list, list],
    cfg: float,
    latent: dict,
    sigmas: torch.Tensor,
    callback: Callable[..., None],
    sampler: comfy.samplers.Sampler | None = None,
) -> torch.Tensor:
    """Sample `latent` (see `labelled_latent`) with seed 0, and restore the random state; returns the final latent.

    The host calls `callback` after each step, with the step's number first; `callback` may raise to stop.
    """
    devices = [patcher.load_device] if patcher.load_device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        samples, sampler = latent["samples"], sampler or comfy.samplers.sampler_object("euler")
        noise = comfy.sample.prepare_noise(samples, seed=0)
        options = {"noise_mask": latent["noise_mask"], "callback": callback, "disable_pbar": True, "seed": 0}
        return comfy.sample.sample_custom(patcher, noise, cfg, sampler, sigmas, *conditioning, samples, **options)


def sample_once(
    patcher,
    conditioning: tuple[list, list],
    cfg: float,
    latent: dict,
    on_step: Callable[[], None],
    each_prompt_alone: bool = False,
) -> None:
    """Sample `STEPS` steps for each range of the schedule; `on_step` may raise to stop.

    With `each_prompt_alone` each prompt runs in a call by itself, as when memory is too short for all at once.
    """
    if each_prompt_alone:
        patcher = patcher.clone()
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one)
    sigmas = schedule(patcher.get_model_object("model_sampling"), conditioning, STEPS)
    sample(patcher, conditioning, cfg, latent, sigmas, lambda *_: on_step())


def one_by_one(executor, model, conditions: list, *args: object) -> list:
    """A CALC_COND_BATCH wrapper of the host: each condition in a call by itself."""
    results = executor(model, [None] * len(conditions), *args)
    for at, entries in enumerate(conditions):
        for entry in entries or ():
            alone = [[entry] if at == i else None for i in range(len(conditions))]
            results[at] = executor(model, alone, *args)[at]
    return results


def schedule(model_sampling, conditioning: tuple[list, list], steps: int) -> torch.Tensor:
    """Sigmas `[steps * ranges + 1]`, falling to 0: `steps` of them in each range in which the same conditions hold.

    Prompts, ControlNets and hooks may begin and end at a share of the schedule (`start_percent`, `end_percent`).
    """
    bounds = [0.0, *sorted(_percents(conditioning)), 1.0]
    if len(bounds) == 2:
        return comfy.samplers.calculate_sigmas(model_sampling, "simple", steps)
    sigmas = []
    for start, end in pairwise(bounds):
        for step in range(steps):
            share = start + (end - start) * (step + 1) / (steps + 1)
            sigmas.append(float(model_sampling.percent_to_sigma(share)))
    return torch.tensor([*sigmas, 0.0])


def ranges_of(conditioning: tuple[list, list]) -> int:
    """Into how many parts the conditioning divides the schedule."""
    return len(_percents(conditioning)) + 1


def _percents(conditioning: tuple[list, list]) -> set[float]:
    """Where in the schedule the conditions change."""
    percents: list[float] = []
    for _, options in (entry for entries in conditioning for entry in entries):
        names = ("start_percent", "end_percent", "clip_start_percent", "clip_end_percent")
        percents += [options[name] for name in names if name in options]
        control = options.get("control")
        while control is not None:
            percents += getattr(control, "timestep_percent_range", None) or ()
            control = getattr(control, "previous_controlnet", None)
        for hook in getattr(options.get("hooks"), "hooks", ()):
            percents += [frame.start_percent for frame in hook.hook_keyframe.keyframes]
    return {percent for percent in percents if 0.0 < percent < 1.0}
