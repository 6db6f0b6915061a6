"""Put compiled forwards into the blocks of a model for the length of one call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..blocks import channels_last
from ..blocks.convolutions import Effort, is_convolutional, parts_of
from ..blocks.discovery import BlockPlan, find_blocks
from ..blocks.duplicate_classes import Twin, find_twins, one_class
from ..blocks.methods import MethodsNow
from ..forwards import exchanged, given_forward
from ..per_model import PerModel
from ..settings import CompileSettings
from .group import BlockGroup
from .registry import ModelCode, code_of


class BlockWeights(Protocol):
    """The weights of one block, which are somewhere else until it runs."""

    def place(self) -> None: ...

    def release(self) -> None: ...


class ModelWeights(Protocol):
    """Those of a model's blocks, by `id` of the block; blocks whose weights are in place have none."""

    @property
    def of_block(self) -> Mapping[int, BlockWeights]: ...

    @property
    def may_stay(self) -> bool: ...

    @property
    def paged(self) -> bool: ...

    def drop(self) -> None: ...


# All blocks of a model, found once.
plan_for = PerModel(lambda model: code_of(model).look(model, lambda: find_blocks(model), BlockPlan((), 0)))


class Binding:
    """The chosen blocks of a model for one call of it.

    Args:
        call: what holds for all blocks; its `poll` is called before each of them.
        weights_of: says how the weights of the given blocks get in place, where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: CompileSettings,
        call: ModelCall,
        weights_of: Callable[[list[nn.Module]], ModelWeights] | None = None,
    ):
        self._model, self.settings, self.call = model, settings, call
        self._blocks = list(modules_at(model, plan_for(model).select(settings.patterns)))
        self._free = [block for block in self._blocks if _is_free(block)]
        self._weights: ModelWeights | None = None
        if weights_of is not None:
            self._weights = code_of(model).look(model, lambda: weights_of(self._free), None)

    @property
    def plain(self) -> bool:
        """Whether the model is as the host made it: no foreign forward or hook in a block, weights that can stay in place."""
        whole = len(self._free) == len(self._blocks)
        hooked = any(block._forward_hooks or block._forward_pre_hooks for block in self._blocks)
        return whole and not hooked and (self._weights is None or self._weights.may_stay)

    @property
    def paged(self) -> bool:
        """Whether blocks get weights that the host pages."""
        return self._weights is not None and self._weights.paged

    @contextmanager
    def bound(self) -> Iterator[None]:
        """While it lasts, the blocks run compiled.

        Only `block.__dict__["forward"]` changes: classes, `named_modules()` and `state_dict()` keys stay as they are, hooks run
        as ever, and a forward that somebody else has put there is left alone. All is put back at the end, also after an error.
        """
        code = code_of(self._model)
        no_runs: dict[nn.Module, _Run] = {}
        runs = code.look(self._model, lambda: self._runs(code), no_runs)
        if code.twins is None:
            no_twins: list[Twin] = []
            code.twins = code.look(self._model, lambda: find_twins(self._model), no_twins)
        try:
            with (
                exchanged({block: functools.partial(_run_block, run, block) for block, run in runs.items()}),
                one_class(code.twins),
            ):
                yield
            code.called(Counter(type(block).__name__ for block in runs), self.call.ran)
            effort = next((run.effort for run in runs.values()), None)  # one for all
            code.too_small = Counter(effort.left_out.values()) if effort is not None else Counter()
        finally:
            if self._weights is not None:
                self._weights.drop()

    def _runs(self, code: ModelCode) -> dict[nn.Module, _Run]:
        """How each block runs. Some of a UNet's run eager, or are compiled in parts; their weights are put in place all the
        same, since the block before has begun to fetch them."""
        if self.settings.backend == "cudagraphs":  # that one records eager code, see cuda_graphs/capture.py
            code.left_out, code.parts = Counter(), Counter()
            return {}
        chooses = not self.settings.compiles_convolutions and not all(map(is_convolutional, self._free))
        left_out = [block for block in self._free if chooses and is_convolutional(block)]
        parts = {block: found for block in self._free if chooses and (found := _free_parts(block))}
        code.left_out = Counter(type(block).__name__ for block in left_out)
        code.parts = Counter(type(part).__name__ for found in parts.values() for part in found)
        eager = {*left_out, *parts}
        to_compile = [part for block in self._free for part in parts.get(block, [block]) if part not in eager]
        now = MethodsNow()
        groups = {block: group for block in to_compile if (group := code.group_of(block, self.settings, now)) is not None}
        effort = Effort(Counter(map(id, groups.values()))) if left_out else None
        places = self._weights.of_block if self._weights is not None else {}
        runs = {}
        for block in dict.fromkeys([*self._free, *groups]):
            group, weights = groups.get(block), places.get(id(block))
            if group is not None or weights is not None:
                runs[block] = _Run(self.call, group, weights, effort)
        return runs


@contextmanager
def compiled_blocks(model: nn.Module, settings: CompileSettings, call: ModelCall | None = None, **options) -> Iterator[bool]:
    """While it lasts, the chosen blocks of `model` run compiled; yields `Binding.plain`, and takes the options of `Binding`."""
    binding = Binding(model, settings, call or ModelCall(), **options)
    with binding.bound():
        yield binding.plain


@dataclass(frozen=True)
class _Run:
    """How a block runs in this call of the model; see `Binding`.

    Args:
        group: its compiled code; None if it runs eager.
    """

    call: ModelCall
    group: BlockGroup | None
    weights: BlockWeights | None
    effort: Effort | None


def _run_block(run: _Run, block: nn.Module, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_dynamo_compiling():  # this call: somebody compiles the whole model around us
        return type(block).forward(block, *args, **kwargs)
    run.call.ran = True
    run.call.poll()
    with nullcontext() if run.weights is None else _placed(run.weights):
        if run.group is None or (run.effort is not None and run.effort.is_too_small(run.group, block, args)):
            return type(block).forward(block, *args, **kwargs)
        if not channels_last.is_active():
            return run.group(block, run.call, args, kwargs)
        with channels_last.paused():
            args, copies = channels_last.to_channels_last(args)
            result = run.group(block, run.call, args, kwargs)
            for image, copy in copies:
                image.copy_(copy)
            return channels_last.result_channels_last(result)


def chosen_modules(model: nn.Module, settings: CompileSettings) -> list[nn.Module]:
    """What is compiled of a model: blocks, or of blocks of convolutions their parts."""
    blocks = list(modules_at(model, plan_for(model).select(settings.patterns)))
    if settings.compiles_convolutions or all(map(is_convolutional, blocks)):
        return blocks
    return [m for block in blocks for m in (parts_of(block) or [block]) if not is_convolutional(m)]


def is_ours(forward: object) -> bool:
    """Whether a module's `forward` is one that `Binding` has put there; others may be partials too."""
    return isinstance(forward, functools.partial) and forward.func is _run_block


@contextmanager
def _placed(weights: BlockWeights) -> Iterator[None]:
    try:
        with channels_last.paused() if channels_last.is_active() else nullcontext():
            weights.place()
        yield
    finally:
        weights.release()


def _free_parts(block: nn.Module) -> list[nn.Module]:
    """What is compiled in place of a block of images; nothing if somebody has replaced one of its parts."""
    parts = parts_of(block)
    return parts if all(map(_is_free, parts)) else []


def _is_free(block: nn.Module) -> bool:
    """Whether the block runs its class's forward, and nobody has put another one in its place."""
    return given_forward(block) is None


def modules_at(model: nn.Module, plan: BlockPlan) -> Iterator[nn.Module]:
    """The modules of the plan's blocks, those that are there."""
    for block in plan.blocks:
        module: nn.Module | None = model
        for name in block.path.split(".") if block.path else ():
            module = module._modules.get(name) if module is not None else None
        if module is not None:
            yield module
