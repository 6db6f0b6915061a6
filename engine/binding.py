"""Put compiled forwards into the blocks of a model for the length of one call."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from . import channels_last
from .compiled_kind import CompiledKind
from .discovery import BlockPlan, find_blocks
from .per_model import PerModel
from .registry import code_of
from .settings import CompileSettings
from .twins import find_twins, one_class


class WeightGroup(Protocol):
    """The weights of one block, which are somewhere else until it runs."""

    def place(self) -> None: ...

    def release(self) -> None: ...


class WeightGroups(Protocol):
    """The groups of a model, by `id` of the block; blocks whose weights are in place have none."""

    groups: dict[int, WeightGroup]
    may_stay: bool

    def drop(self) -> None: ...


# All blocks of a model, found once.
plan_for = PerModel(find_blocks)


@contextmanager
def compiled_blocks(
    model: nn.Module,
    settings: CompileSettings,
    poll: Callable[[], None],
    inputs: tuple = (),
    weights_of: Callable[[list[nn.Module]], WeightGroups] | None = None,
    captured: bool = False,
) -> Iterator[bool]:
    """While the context lasts, the chosen blocks of `model` run compiled.

    Only `block.__dict__["forward"]` changes: classes, `named_modules()` and `state_dict()` keys stay as they are, hooks run as
    ever, and a forward that somebody else has put there is left alone. All is put back at the end, also after an error.

    Args:
        poll: called before each block; may raise to stop (the host's interrupt).
        inputs: shapes of what the model is called with; the first ever get code of their own in `dynamic` = auto.
        weights_of: says how the weights of the given blocks get in place, where they are not.
        captured: if it yields True, the model is replayed from CUDA graphs. Blocks of convolutions then stay eager, as they are
            most of what a UNet has to compile; see `channels_last` for what is done for them instead.

    Yields:
        Whether the model is as the host made it: no foreign forward or hook in a block, weights that can stay where they are.
    """
    code = code_of(model)
    first_shape = code.first_inputs.setdefault(settings.kind_key(), inputs) == inputs
    blocks = list(modules_at(model, plan_for(model).select(settings.patterns)))
    free = [block for block in blocks if _is_free(block)]
    weights = weights_of(free) if weights_of is not None else None
    plain = len(free) == len(blocks) and not any(b._forward_hooks or b._forward_pre_hooks for b in blocks)
    plain = plain and (weights is None or weights.may_stay)
    compiles = settings.backend != "cudagraphs"  # that one records eager code, see graphs.py
    left_out = {block for block in free if captured and plain and is_convolutional(block)}
    code.left_out = Counter(type(block).__name__ for block in left_out)
    to_compile = [block for block in free if compiles and block not in left_out]
    kinds = {block: kind for block in to_compile if (kind := code.kind_of(block, settings)) is not None}
    if code.twins is None:
        code.twins = find_twins(model)
    bound: list[tuple[nn.Module, Callable | None]] = []
    try:
        for block, kind in kinds.items():
            bound.append((block, block.__dict__.get("forward")))
            group = weights.groups.get(id(block)) if weights is not None else None
            block.__dict__["forward"] = functools.partial(_run_block, poll, kind, group, first_shape, block)
        with one_class(code.twins):
            yield plain
    finally:
        if weights is not None:
            weights.drop()
        for block, found in reversed(bound):
            if found is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = found


def _run_block(
    poll: Callable[[], None],
    kind: CompiledKind,
    group: WeightGroup | None,
    first_shape: bool,
    block: nn.Module,
    *args: object,
    **kwargs: object,
) -> object:
    if torch.compiler.is_compiling():  # somebody compiles the whole model around us
        return type(block).forward(block, *args, **kwargs)
    if channels_last.is_active():
        with channels_last.paused():
            args, copies = channels_last.turned(args)
            result = _run_block(poll, kind, group, first_shape, block, *args, **kwargs)
            for image, copy in copies:
                image.copy_(copy)
            return channels_last.turned_result(result)
    poll()
    if group is None:
        return kind(block, first_shape, args, kwargs)
    try:
        group.place()
        return kind(block, first_shape, args, kwargs)
    finally:
        group.release()


def _mostly_convolutions(block: nn.Module) -> bool:
    layers = [m for m in block.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    convolutions = sum(p.numel() for m in layers for p in m.parameters())
    return 2 * convolutions > sum(p.numel() for p in block.parameters())


# Whether most weights of a block are those of convolutions over images or video.
is_convolutional = PerModel(_mostly_convolutions)


def _is_free(block: nn.Module) -> bool:
    """Whether the block runs its class's forward, and nobody has put another one in its place.

    The host leaves `forward` in `__dict__` after it takes an object patch back; that one is the block's own.
    """
    found = block.__dict__.get("forward")
    if found is None:
        return True
    return isinstance(found, types.MethodType) and found.__func__ is type(block).forward and found.__self__ is block


def modules_at(model: nn.Module, plan: BlockPlan) -> Iterator[nn.Module]:
    """The modules of the plan's blocks, those that are there."""
    for block in plan.blocks:
        module: nn.Module | None = model
        for name in block.path.split(".") if block.path else ():
            module = module._modules.get(name) if module is not None else None
        if module is not None:
            yield module
