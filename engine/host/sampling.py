"""Run the host's own sampling path for a size, as a real generation does."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch

from ..errors import InvalidSetting
from ..warmup_plan import Size

# Some models keep state that only the second call uses (KV caches), so one model call is not enough.
STEPS = 2


def empty_latent(patcher, size: Size) -> torch.Tensor:
    """An empty latent of the model's own format.

    Returns:
        `[batch, channels, height, width]`, with frames before height for video models, in latent units.

    Raises:
        InvalidSetting: the model cannot make that size.
    """
    latent_format = patcher.get_model_object("latent_format")
    ratio = latent_format.spacial_downscale_ratio
    dimensions = latent_format.latent_dimensions
    if dimensions == 1:
        raise InvalidSetting("width", size.width, "this model makes sound, not images; connect latent_image instead.")
    for name in ("width", "height"):
        value = getattr(size, name)
        if value < ratio:
            raise InvalidSetting(name, value, f"too small for this model; use at least {ratio} pixels.")
    shape = [size.batch, latent_format.latent_channels, size.height // ratio, size.width // ratio]
    if dimensions == 3:
        shape.insert(2, (size.length - 1) // latent_format.temporal_downscale_ratio + 1)
    elif size.length > 1:
        raise InvalidSetting("length", size.length, "this model makes images, not video; set length to 1.")
    return torch.zeros(shape, device=comfy.model_management.intermediate_device())


def prepared_latent(patcher, latent: dict) -> torch.Tensor:
    """The tensor of a LATENT input, fitted to the model as the host's KSampler does (nodes.py, common_ksampler)."""
    samples = latent["samples"]
    try:
        return comfy.sample.fix_empty_latent_channels(
            patcher, samples, latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
        )
    except TypeError:  # hosts before 0.28 take the first two only
        return comfy.sample.fix_empty_latent_channels(patcher, samples)


def sample_once(
    patcher, positive: list, negative: list, cfg: float, latent: torch.Tensor, on_step: Callable[[int], None]
) -> None:
    """Sample `STEPS` steps and leave the random state as found.

    Args:
        latent: empty latent, see `empty_latent`.
        on_step: called with the number of finished steps; may raise to stop.
    """
    sampling = patcher.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", STEPS)
    sampler = comfy.samplers.sampler_object("euler")
    devices = [patcher.load_device] if patcher.load_device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        noise = comfy.sample.prepare_noise(latent, seed=0)
        comfy.sample.sample_custom(
            patcher,
            noise,
            cfg,
            sampler,
            sigmas,
            positive,
            negative,
            latent,
            callback=lambda step, *_: on_step(step + 1),
            disable_pbar=True,
            seed=0,
        )
