"""Put compiled forwards into the blocks of a model for the length of one call."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..blocks.convolutions import Effort, choose, kind_of, parts_of
from ..blocks.discovery import BlockPlan, find_blocks, foreign_forward, size_of, unwrapped
from ..channels_last import function_mode
from ..devices import is_capturing
from ..failures.describe import is_out_of_memory
from ..log import logger
from ..ownership import exchanged, given_forward, named_origin
from ..per_model import PerModel, SameObjects
from ..settings import CompileSettings
from .eager import CALL_SECONDS, RUN_SECONDS, Eager
from .registry import ModelCode, code_of


class _Search:
    """The blocks of a model, and its modules when the blocks were last searched for."""

    def __init__(self, model: nn.Module):
        self.plan = find_blocks(model)
        self.modules = SameObjects(model.modules())
        self.run = code_of(model).runs
        code_of(model).not_looked_at.pop(type(model).__name__, None)  # left by a search that failed

    def plan_now(self, model: nn.Module) -> BlockPlan:
        """Once a run: search again if the model's modules have changed, as another node's modules may have hidden blocks."""
        if self.run != code_of(model).runs:
            self.run = code_of(model).runs
            if not self.modules.are(model.modules()):
                search = _Search(model)
                self.modules = search.modules
                if _covered(model, search.plan) > _covered(model, self.plan):
                    self.plan = search.plan
        return self.plan


_searches = PerModel(_Search)


def plan_for(model: nn.Module) -> BlockPlan:
    """All blocks of a model; none while the search fails, because of another node's patches for example."""
    return code_of(model).look(model, lambda: _searches(model).plan_now(model), BlockPlan((), 0))


def _covered(model: nn.Module, plan: BlockPlan) -> int:
    """The number of parameters in the blocks of a plan that the model has now."""
    return 0 if plan.whole_model else sum(map(size_of, dict.fromkeys(modules_at(model, plan))))


class Binding:
    """The chosen blocks of a model for one call of it.

    Args:
        call: its `poll` is called before each block.
        weights_of: makes the host's `ModelWeights` (host/weights/blocks.py, not imported here) for a list of blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: CompileSettings,
        call: ModelCall | None = None,
        weights_of: Callable[[list[nn.Module]], Any] | None = None,
    ):
        self._model, self.settings, self.call = model, settings, call or ModelCall()
        self._blocks = blocks_of(model, settings)
        self._free = [block for block in self._blocks if foreign_forward(block) is None]
        code = code_of(model)
        code.look(model, lambda: code.note_taken(self._taken()), None)
        self._weights: Any = None
        if weights_of is not None:
            self._weights = code.look(model, lambda: weights_of(self._free), None)

    def _taken(self) -> Iterator[tuple[str, str]]:
        """Yield (class, name of the forward) for each block, or part of a free block, that has another node's forward."""
        for block in (*self._blocks, *itertools.chain.from_iterable(map(parts_of, self._free))):
            if (forward := foreign_forward(block)) is not None:
                yield type(unwrapped(block)).__name__, named_origin(forward)

    @property
    def plain(self) -> bool:
        """Whether the model is as the host made it: no foreign forward or hook on a block, weights that stay in place."""
        hooked = any(block._forward_hooks or block._forward_pre_hooks for block in self._blocks)
        is_untouched = len(self._free) == len(self._blocks) and not hooked
        return is_untouched and not self.weights_move

    @property
    def weights_move(self) -> bool:
        return self._weights is not None and not self._weights.may_stay

    @property
    def paged(self) -> bool:
        return self._weights is not None and self._weights.paged

    @contextmanager
    def bound(self) -> Iterator[None]:
        """A context in which the blocks run compiled.

        Only `block.__dict__["forward"]` changes: classes, `named_modules()` and `state_dict()` keys stay as they are, hooks run
        as always, and a forward that another node has put on a block stays.
        """
        code = code_of(self._model)
        self.call.uncompiled |= self.call.waits
        self.call.trace_seconds = min(CALL_SECONDS, RUN_SECONDS - code.traced)
        runs: dict[nn.Module, _Run] = code.look(self._model, lambda: self._runs(code), {})
        try:
            with exchanged({block: functools.partial(_run_block, runs, block) for block in runs}):
                yield
            code.called(Counter(type(block).__name__ for block in runs), self.call.ran)
            code.eager[Eager.SMALL] = Counter(self.call.effort.left_out.values() if self.call.effort is not None else ())
        finally:
            runs.clear()  # a forward of ours that another node has kept runs uncompiled
            code.bound = []
            called = (group for group in code.groups.values() if group.called_in == self.call.began)
            self.call.uncompiled |= any(group.bypassed is not None for group in called)
            code.traced += self.call.traced
            code.lowered += self.call.lowered
            code.lacking += self.call.put_off and self.call.puts_off
            code.mixed += self.call.uncompiled and self.call.ran_code
            code.put_off += self.call.put_off and not self.call.puts_off
            code.packings = code.packings | self.call.packings
            if self._weights is not None:
                self._weights.drop()  # before `over` queues jobs, for which the worker needs memory
            self.call.over()

    def _runs(self, code: ModelCode) -> dict[nn.Module, _Run]:
        """How each block runs. Blocks of a UNet that run eager, or are compiled in parts, also need their weights put in place:
        the block before has begun to fetch these weights."""
        if self.settings.backend == "cudagraphs":  # that backend records eager code, see cuda_graphs/capture.py
            code.eager.clear()
            code.parts.clear()
            return {}
        choice = choose(self._free, self.settings)
        code.eager[Eager.CONVOLUTIONS] = Counter(type(block).__name__ for block in choice.left_out)
        code.parts = Counter(type(part).__name__ for part in choice.parts)
        self.call.effort = Effort(Counter(map(kind_of, choice.compiled))) if choice.left_out else None
        places = self._weights.of_block if self._weights is not None else {}
        compiled = {} if self.call.waits else dict.fromkeys(choice.compiled)
        code.bound = list(compiled)
        runs = {}
        for block in dict.fromkeys([*self._free, *compiled]):
            weights = places.get(id(block))
            if given_forward(block) is not None:  # by a wrapper around the model, since this binding was made
                continue
            if block in compiled or weights is not None:
                runs[block] = _Run(self.call, code if block in compiled else None, self.settings, weights)
        return runs


@dataclass(frozen=True)
class _Run:
    """How a block runs in this call of the model. Without `code` it runs eager; without `weights` its weights are in place."""

    call: ModelCall
    code: ModelCode | None
    settings: CompileSettings
    weights: Any


def _run_block(runs: dict[nn.Module, _Run], block: nn.Module, *args: object, **kwargs: object) -> object:
    # If Dynamo traces this function, another node compiles the whole model.
    run = None if torch.compiler.is_dynamo_compiling() else runs.get(block)
    if run is None:
        return type(block).forward(block, *args, **kwargs)
    run.call.ran = True
    run.call.poll()
    # Look at the block only now that it is called: wrappers around the model, or code between its blocks, may have changed it.
    group, state = (None, None) if run.code is None else run.code.group_of(block, run.settings)
    try:
        if not _has_weights(run) or group is None or state is None:
            return type(block).forward(block, *args, **kwargs)
        return group(block, state, run.call, args, kwargs)
    finally:
        if run.weights is not None:
            run.weights.release()


def _has_weights(run: _Run) -> bool:
    """Put the block's weights in place; False if memory is too short for all of them: then the host fetches layer by layer."""
    if run.weights is None:
        return True
    try:
        with function_mode.paused():
            run.weights.place()
    except RuntimeError as error:
        if not is_out_of_memory(error) or is_capturing():
            raise
        logger.debug("no room for the weights of a block: %s", error)
    else:
        return True
    run.weights.release()
    run.call.uncompiled = True
    return False


def blocks_of(model: nn.Module, settings: CompileSettings) -> list[nn.Module]:
    return list(dict.fromkeys(modules_at(model, plan_for(model).matching(settings.patterns))))


def modules_at(model: nn.Module, plan: BlockPlan) -> Iterator[nn.Module]:
    """Yield the modules of the plan's blocks, except those that a patch has removed, or that another node compiles from
    outside. Where a patch has put one module over several blocks (a step cache), yield the blocks inside that module."""
    classes = {block.class_name for block in plan.blocks}
    for block in plan.blocks:
        module: nn.Module | None = model
        for name in block.path.split(".") if block.path else ():
            module = module._modules.get(name) if module is not None else None
        if module is not None and type(module).__name__ not in classes:
            inside = [m for m in module.modules() if type(m).__name__ in classes]
            yield from inside if len(inside) > 1 else [module]
        elif module is not None:
            yield module
