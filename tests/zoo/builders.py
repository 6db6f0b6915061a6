"""What every set-up of the zoo is made of: a tiny network of the host, its latents and its conditioning.

Import it only where the host is on sys.path. The same name always gives the same weights and the same inputs.
"""

import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import comfy.model_patcher
import comfy.nested_tensor
import comfy.sampler_helpers
import comfy.samplers
import comfy.supported_models
import comfy.utils
import torch

CPU = torch.device("cpu")


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 0.5) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def ids(self, *shape: int, below: int) -> torch.Tensor:
        return torch.randint(1, below, shape, generator=self.generator)


def no_extras(draw: Draw, shape: tuple, tokens: int) -> dict:
    return {}


@dataclass(frozen=True, eq=False)
class Setup:
    """One architecture of the host, small enough for a CPU."""

    name: str
    config: str
    """Name of the class in `comfy.supported_models`."""
    unet: dict = field(repr=False)
    """Configuration of the network, as the host reads it from a checkpoint."""
    shapes: tuple = field(repr=False)
    """Three latent shapes without the batch; a list of shapes where the latent is nested."""
    text: int | None = None
    """Width of the text, None where there is no text."""
    pooled: int | None = None
    extras: Callable[[Draw, tuple, int], dict] = field(default=no_extras, repr=False)
    """The other entries of a conditioning, from (draw, latent shape, tokens)."""
    tokens: int = 12
    fixed_tokens: bool = False
    """The model, or what the host does before it, settles the length of the text."""
    rows: int = 1
    """Rows of the latent for one of the batch: video models of the UNet kind keep their frames there."""
    max_batch: int | None = None
    std: float = 0.05
    tensors: Callable[[Draw], dict] | None = field(default=None, repr=False)
    """Tensors that the host's `get_model` itself takes out of a checkpoint."""
    finish: Callable[[torch.nn.Module, Draw], None] | None = field(default=None, repr=False)
    """Sets what random numbers cannot fill."""
    amend: Callable[[torch.nn.Module], None] | None = field(default=None, repr=False)
    """Changes the model before it gets its weights."""
    options: Callable[[torch.nn.Module, torch.Tensor], dict] | None = field(default=None, repr=False)
    """More entries of `transformer_options`, from (model, latent); a sampler of the host gives them."""
    needs: str = ""
    """A module of the host that came with this model, where `config` is an older model's."""
    device: torch.device = CPU
    """Where the host builds it: on `meta` if `amend` makes it small enough for the CPU only afterwards."""

    @property
    def available(self) -> bool:
        """Whether this host has the model."""
        return hasattr(comfy.supported_models, self.config) and (not self.needs or find_spec(self.needs) is not None)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @property
    def nested(self) -> bool:
        return isinstance(self.shapes[0], list)

    def build(self):
        """The host's model, with random weights in fp32 on the CPU."""
        config = getattr(comfy.supported_models, self.config)(dict(self.unet))
        # The host's own constants for the real sizes give way.
        config.unet_config.update((key, value) for key, value in self.unet.items() if key in config.unet_config)
        config.set_inference_dtype(torch.float32, None)
        draw = Draw(self.seed)
        model = config.get_model(self.tensors(draw) if self.tensors else {}, "", device=self.device)
        if self.amend:
            self.amend(model)
        randomise(model, draw, self.std)
        if self.finish:
            self.finish(model, draw)
        return model.requires_grad_(False).eval()

    def conds(self, size: int = 0, tokens: int | None = None) -> tuple[list, list]:
        """The positive and the negative conditioning, as the host's nodes make them."""
        return tuple(self._cond(size, tokens, self.seed + sign) for sign in (1, 2))

    def latent(self, size: int = 0, batch: int = 1):
        """An empty latent."""
        shape = self.shapes[size]
        if self.nested:
            return comfy.nested_tensor.NestedTensor([torch.zeros(batch, *part) for part in shape])
        return torch.zeros(batch * self.rows, *shape)

    def _cond(self, size, tokens, seed):
        draw, tokens = Draw(seed), self.text_length(tokens)
        text = None if self.text is None else draw(1, tokens, self.text)
        entries = {"pooled_output": None if self.pooled is None else draw(1, self.pooled)}
        entries.update(self.extras(draw, self.shapes[size], tokens))
        return [[text, entries]]

    def text_length(self, tokens):
        return self.tokens if tokens is None or self.fixed_tokens else tokens

    def inputs(self, size: int = 0, batch: int = 2, tokens: int | None = None, model=None, percent: float = 0.4) -> dict:
        """Arguments of `apply_model` in the form in which the sampler passes them.

        An even batch is half positive and half negative, as with cfg, if the sampler itself would join the two.
        `model` is a built one; without it one is built, for it is the model that turns conditioning into arguments.
        """
        model = model or self.build()
        batch = min(batch, self.max_batch or batch)
        noise, shapes = _packed(
            [
                Draw(self.seed + 3)(batch * self.rows, *shape, scale=1.0)
                for shape in (self.shapes[size] if self.nested else [self.shapes[size]])
            ]
        )
        sigma = torch.tensor([float(model.model_sampling.percent_to_sigma(percent))])
        x = model.model_sampling.noise_scaling(sigma, noise, torch.zeros_like(noise))
        out = self._arguments(model, noise, shapes, self.conds(size, tokens), len(noise))
        count = len(out.pop("kinds"))
        options = {
            "cond_or_uncond": [1, 0][-count:],
            "uuids": [uuid.UUID(int=i) for i in range(count)],
            "sigmas": sigma,
            "sample_sigmas": torch.cat([sigma * 1.5, sigma, sigma * 0]),
        }
        options.update(self.options(model, x) if self.options else {})
        return {"x": x, "t": sigma.repeat(len(x)), "transformer_options": options, **out}

    def _arguments(self, model, noise, shapes, conds, rows):
        half = noise[: max(1, rows // 2)] if rows // self.rows % 2 == 0 else noise
        both = [
            self._encode(model, cond, half, shapes, kind) for cond, kind in zip(conds, ("positive", "negative"), strict=True)
        ]
        if len(half) < rows and comfy.samplers.cond_equal_size(*both):
            # The sampler puts the negative first.
            return {"kinds": both, **comfy.samplers.cond_cat(both[::-1])}
        if len(half) < rows:
            both = [self._encode(model, conds[0], noise, shapes, "positive")]
        return {"kinds": both[:1], **{key: value.cond for key, value in both[0].items()}}

    def _encode(self, model, cond, noise, shapes, kind):
        cond = comfy.sampler_helpers.convert_cond(cond)
        latent = torch.zeros_like(noise)
        cond = comfy.samplers.encode_model_conds(
            model.extra_conds, cond, noise, CPU, kind, latent_image=latent, denoise_mask=None, seed=1, latent_shapes=shapes
        )
        return {key: value.process_cond(batch_size=len(noise), area=None) for key, value in cond[0]["model_conds"].items()}

    def patcher(self, model=None):
        return comfy.model_patcher.ModelPatcher(model or self.build(), load_device=CPU, offload_device=CPU)


def _packed(parts):
    if len(parts) == 1:
        return parts[0], [parts[0].shape]
    return comfy.utils.pack_latents(parts)


@torch.no_grad()
def randomise(module: torch.nn.Module, draw: Draw, std: float) -> None:
    for name, tensor in module.named_parameters():
        if not tensor.is_floating_point():
            continue
        # Norm weights stay near one, or the signal dies within a few blocks.
        one = tensor.dim() == 1 and name.rsplit(".", 1)[-1] in ("weight", "scale", "gamma", "g")
        tensor.copy_(draw(*tensor.shape, scale=std) + (1.0 if one else 0.0))


def sizes(channels: int, *spans: tuple) -> tuple:
    """Latent shapes of these channels."""
    return tuple((channels, *span) for span in spans)
