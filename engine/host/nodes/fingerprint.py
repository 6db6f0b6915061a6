"""Describe a sampling run by what its compiled code could depend on.

What cannot be told apart by content is told apart by identity: a doubt costs a run, and never a compilation later.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable, Mapping

import comfy.controlnet
import torch

from ...identity import Same
from ...settings import CompileSettings
from ...torch_settings import precision_of
from ..model.attach import KEY

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))
# Of the patcher, beside its options. Values of weight patches are no matter: blocks see plain weights.
_PATCHER = ("object_patches", "weight_wrapper_patches", "injections", "wrappers", "callbacks", "attachments")


def fingerprint(patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float, latent: dict) -> Hashable:
    """Equal for two runs that need the same compiled code.

    Args:
        conditioning: positive and negative.
        latent: a LATENT; its numbers are no matter.
    """
    others = [p.model for patchers in getattr(patcher, "additional_models", {}).values() for p in patchers]
    described = [getattr(patcher, name, None) for name in _PATCHER]
    described += [patcher.model_options, others, conditioning, [v for v in latent.values() if isinstance(v, torch.Tensor)]]
    about_torch = (  # torch/_dynamo/guards.py, global state
        *(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled()),
        *(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        precision_of(torch.backends.cuda.matmul),
    )
    about_model = patcher.load_device, patcher.model.get_dtype_inference(), frozenset(patcher.patches)
    return settings, about_model, cfg == 1.0, about_torch, _describe(described)


def _describe(value: object) -> Hashable:
    """Of tensors their shapes, not their numbers; other objects by identity."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return tuple(value.shape), value.dtype, value.device, value.is_contiguous()
    if isinstance(value, comfy.controlnet.ControlBase):  # copied at each execution of its node
        return type(value), _describe(vars(value))
    if isinstance(value, Mapping):  # without what we have registered ourselves, which is made anew each time the node runs
        return "mapping", tuple((_describe(k), _describe(v)) for k, v in value.items() if k != KEY)
    if isinstance(value, list | tuple):
        return "list", tuple(map(_describe, value))
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(_describe, value))
    if isinstance(value, types.MethodType):  # a new object at each access
        return Same(value.__self__), Same(value.__func__)
    return Same(value)
