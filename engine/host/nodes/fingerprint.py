"""Describe a sampling run by what its compiled code could depend on.

What cannot be told apart by content is told apart by identity: a doubt costs a run, and never a compilation later.
"""

from __future__ import annotations

import enum
import itertools
import math
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


def fingerprint(
    patcher,
    settings: CompileSettings,
    conditioning: tuple[list, list],
    cfg: float,
    latent: dict,
    any_length: bool = False,
) -> Hashable:
    """Equal for two runs that need the same compiled code.

    Args:
        conditioning: positive and negative.
        latent: a LATENT; its numbers are no matter.
        any_length: of the lengths of prompts, describe only which are equal, and which can run as one batch.
    """
    others = [p.model for patchers in getattr(patcher, "additional_models", {}).values() for p in patchers]
    described = [getattr(patcher, name, None) for name in _PATCHER]
    described += [patcher.model_options, others, [v for v in latent.values() if isinstance(v, torch.Tensor)]]
    about_torch = (  # torch/_dynamo/guards.py, global state
        *(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled()),
        *(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
        precision_of(torch.backends.cuda.matmul),
    )
    about_model = patcher.load_device, patcher.model.get_dtype_inference(), frozenset(patcher.patches)
    lengths = _lengths_of(conditioning) if any_length else []
    names: dict[int, object] = {length: ("length", at) for at, length in enumerate(dict.fromkeys(lengths)) if length > 1}
    # ComfyUI repeats a prompt at most four times to run it with a longer one (comfy/conds.py, `CONDCrossAttn.can_concat`).
    batches = [math.lcm(a, b) > 4 * min(a, b) for a, b in itertools.combinations(lengths, 2) if a != b]
    return settings, about_model, cfg == 1.0, about_torch, _describe(described), _describe(conditioning, names), tuple(batches)


def _lengths_of(conditioning: tuple[list, list]) -> list[int]:
    """In tokens, of the embeddings `[batch, tokens, channels]`."""
    embeddings = (entry[0] for entries in conditioning for entry in entries)
    return [e.shape[1] for e in embeddings if isinstance(e, torch.Tensor) and e.ndim == 3]


def _describe(value: object, names: Mapping[int, object] = types.MappingProxyType({})) -> Hashable:
    """Of tensors their shapes, not their numbers; other objects by identity.

    Args:
        names: stand for these sizes of tensors.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return tuple(names.get(size, size) for size in value.shape), value.dtype, value.device, value.is_contiguous()
    if isinstance(value, comfy.controlnet.ControlBase):  # copied at each execution of its node
        return type(value), _describe(vars(value), names)
    if isinstance(value, Mapping):  # without what we have registered ourselves, which is made anew each time the node runs
        return "mapping", tuple((_describe(k), _describe(v, names)) for k, v in value.items() if k != KEY)
    if isinstance(value, list | tuple):
        return "list", tuple(_describe(v, names) for v in value)
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(_describe, value))
    if isinstance(value, types.MethodType):  # a new object at each access
        return Same(value.__self__), Same(value.__func__)
    return Same(value)
