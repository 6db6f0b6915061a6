"""Run the host's own sampling path for a size, as a real generation does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch

from ..errors import InvalidSetting, TorchCompileKitError
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


def labelled_latent(patcher, size: Size, latent: dict | None = None) -> tuple[str, torch.Tensor]:
    """What to sample and its name for reports: `latent` if given, else an empty one of that size.

    Raises:
        InvalidSetting: the model cannot make that size.
    """
    if latent is None:
        return size.label(), empty_latent(patcher, size)
    samples = prepared_latent(patcher, latent)
    ratio = patcher.get_model_object("latent_format").spacial_downscale_ratio
    label = "x".join(str(side * ratio) for side in samples.shape[:-3:-1]) if samples.dim() >= 4 else "latent_image"
    return f"{label} batch {samples.shape[0]} (latent_image)", samples


@contextmanager
def naming_the_size(label: str, model_name: str) -> Iterator[None]:
    """A size that the model cannot take becomes an InvalidSetting that names it; running out of memory stays as it is."""
    try:
        yield
    except (TorchCompileKitError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise InvalidSetting("size", label, f"{model_name} cannot sample it: {error}") from error


def sample_once(
    patcher,
    positive: list,
    negative: list,
    cfg: float,
    latent: torch.Tensor,
    on_step: Callable[[int], None],
    steps: int = STEPS,
    sampler: comfy.samplers.Sampler | None = None,
) -> torch.Tensor:
    """Sample with seed 0 and leave the random state as found.

    Args:
        latent: empty latent, see `empty_latent`.
        on_step: called with the number of finished steps; may raise to stop.
        sampler: euler if None.

    Returns:
        The final latent, shaped as `latent`.
    """
    sampling = patcher.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    sampler = sampler or comfy.samplers.sampler_object("euler")
    devices = [patcher.load_device] if patcher.load_device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        noise = comfy.sample.prepare_noise(latent, seed=0)
        return comfy.sample.sample_custom(
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
