"""Describe a sampling run by what its compiled code could depend on."""

from __future__ import annotations

from collections.abc import Hashable

import comfy.controlnet
import torch

from ...settings import CompileSettings
from ...warmup.record import describe, torch_state

_CONTROL = (
    "cond_hint_original", "strength", "timestep_percent_range", "global_average_pooling", "compression_ratio",
    "upscale_algorithm", "latent_format", "vae", "extra_args", "previous_controlnet", "extra_conds", "strength_type",
    "concat_mask", "extra_concat_orig", "extra_hooks", "control_model",
)  # fmt: skip
# Of the patcher, beside its options. Values of weight patches are no matter: blocks see plain weights.
_PATCHER = ("object_patches", "weight_wrapper_patches", "injections", "wrappers", "callbacks", "attachments")


def fingerprint(
    patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float, latent: dict, key: str
) -> Hashable:
    """Equal for two runs that need the same compiled code.

    Args:
        conditioning: positive and negative.
        latent: a LATENT; its numbers are no matter.
        key: under which our own wrappers and callbacks are registered; `settings` says all about them.
    """
    own = {name: _without(getattr(patcher, name, None), key) for name in _PATCHER}
    model = patcher.model
    return (
        settings,
        patcher.load_device,
        model.get_dtype_inference(),
        frozenset(patcher.patches),
        describe(own, _parts),
        describe(patcher.model_options, _parts),
        describe({n: [p.model for p in ps] for n, ps in getattr(patcher, "additional_models", {}).items()}, _parts),
        describe(conditioning, _parts),
        cfg == 1.0,
        describe({name: value for name, value in latent.items() if isinstance(value, torch.Tensor)}),
        torch_state(),
    )


def may_be_skipped(patcher, settings: CompileSettings) -> bool:
    """Whether a run that has been made before need not be made again: not where code depends on where the weights are, or
    where CUDA graphs are recorded anew when the model was unloaded."""
    return settings.block_swap != "eager linears" and not settings.wants_graphs


def _without(registered: object, key: str) -> object:
    """`{group: {key: functions}}` without ours, which are made anew each time the node runs."""
    if not isinstance(registered, dict):
        return registered
    found = {k: {n: v for n, v in by.items() if n != key} if isinstance(by, dict) else by for k, by in registered.items()}
    return {k: v for k, v in found.items() if v != {}}


def _parts(value: object) -> object | None:
    """A ControlNet is copied at each execution of its node: what it is made of says what it does."""
    if not isinstance(value, comfy.controlnet.ControlBase):
        return None
    known = {name: getattr(value, name) for name in _CONTROL if hasattr(value, name)}
    return known if type(value) is comfy.controlnet.ControlNet else {**known, "more": _Anew()}


class _Anew:
    """Equal to nothing: a class of ControlNet that keeps what it is elsewhere."""

    __slots__ = ()
