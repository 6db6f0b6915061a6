"""Describe a call of the host's model in the units of the nodes."""

from __future__ import annotations

import torch

from ...compile.binding import blocks_of
from ...compile.call_shapes import shapes_of
from ...compile.registry import code_of
from ...notices.recompile_log import CallInfo
from ...settings import CompileSettings

# transformer_options among the arguments of `apply_model(x, t, c_concat, c_crossattn, control, transformer_options)`
OPTIONS_AT = 5


def call_info_of(base_model, settings: CompileSettings, args: tuple, kwargs: dict) -> CallInfo:
    """Read off the arguments of `apply_model`.

    Args:
        args: x, t, c_concat, c_crossattn, control, transformer_options.
        kwargs: everything else the conditioning gives the model.
    """
    shape = args[0].shape
    ratio = getattr(base_model.latent_format, "spacial_downscale_ratio", 8)
    frames = getattr(base_model.latent_format, "temporal_downscale_ratio", 1)
    options = args[OPTIONS_AT] if len(args) > OPTIONS_AT else {}
    prompts_per_call = max(1, len(options.get("cond_or_uncond", ())))
    context = args[3] if len(args) > 3 else None
    inputs = {"concat latent": args[2] if len(args) > 2 else None, **kwargs}
    shapes = {name: shapes_of((value,), {}) for name, value in inputs.items()}
    shapes = {name: tuple(tuple(s)[1:] if isinstance(s, torch.Size) else s for s in found) for name, found in shapes.items()}
    return CallInfo(
        width=shape[-1] * ratio if len(shape) >= 4 else 0,
        height=shape[-2] * ratio if len(shape) >= 4 else 0,
        length=(shape[2] - 1) * frames + 1 if len(shape) == 5 else 1,
        batch=shape[0] // prompts_per_call,
        prompts_per_call=prompts_per_call,
        tokens=context.shape[1] if context is not None and context.dim() >= 2 else 0,
        controlnet=len(args) > 4 and args[4] is not None,
        inputs=tuple(sorted((name, found) for name, found in shapes.items() if found)),
        patches=tuple(sorted({*_filled(options.get("patches")), *_filled(options.get("patches_replace"))})),
        layers=_exchanged_layers(base_model.diffusion_model, settings),
    )


def _filled(patches: dict | None) -> list[str]:
    return [name for name, value in (patches or {}).items() if value]


def _exchanged_layers(network, settings: CompileSettings) -> tuple[str, ...]:
    """Names of the forwards that other nodes have given to layers inside blocks."""
    states = [state for block in blocks_of(network, settings) if (state := code_of(network).state_of(block)) is not None]
    codes = {code for state in states for _, code in state.forwards}
    return tuple(sorted({c.__qualname__ if isinstance(c, type) else getattr(c, "co_qualname", c.co_name) for c in codes}))
