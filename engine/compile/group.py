"""Run the blocks of one group, which share compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..blocks.state import BlockState, forwards_outside, sharing_classes
from ..channels_last import function_mode
from ..failures.describe import Failure
from ..log import logger
from ..ownership import forward_inside, forward_of_class, named_origin, rewrapped
from ..settings import CompileSettings
from ..transformer_options.filter import OptionsFilter
from .call_shapes import in_usual_layout, shapes_of
from .compiled_code import OTHERS, BlockCode, first_call_lock
from .eager import Eager, why_eager
from .session import CompileStats, watching


@dataclass(eq=False)
class BlockGroup:
    """Blocks of one class and structure, compiled once and called with the block as `self`.

    Holds no block and no weight: freeing the model frees them at once.

    Args:
        numbers: integer attributes of the first block.
        eager: why calls have run eager so far.
        patched: why the last call, which had patches, could not be one graph, as `fullgraph` demands.
        called_in: start (`ModelCall.began`) of the last call of the model in which a block was called.
        _searches: (shapes, patches) -> None once a block has found code in this run. Until then: start of the first call of the
            model that found none, start of the last one in which a block searched, and `BlockCode.compiles` before the first.
        _outer: the function that packs have put around the forward of the class, else that forward.
        _came_in: start of the last call of the model in which `_outer` called the group's code.
    """

    class_name: str
    forward: Callable
    settings: CompileSettings
    numbers: dict[str, int] | None = None
    eager: set[Eager] = field(default_factory=set)
    patched: Failure | None = None
    _searches: dict[tuple, tuple[int, int, int] | None] = field(default_factory=dict)
    _outer: object = None
    called_in: int = 0
    _came_in: int = 0
    _seen: set[tuple] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        code = self.forward.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._options_at = names.index("transformer_options") if "transformer_options" in names else None
        self.code = BlockCode(self.class_name, self.forward, self.settings)

    @property
    def stats(self) -> CompileStats:
        return self.code.stats

    @property
    def failure(self) -> Failure | None:
        """Why all calls, or those with some patches, run eager."""
        return self.code.failure or self.patched or self.bypassed or next(iter([*self.code.failures.values()]), None)

    @property
    def failure_now(self) -> Failure | None:
        """Why the current call runs eager."""
        return self.code.failure or self.patched or self.code.failures.get(self.code.patches)

    def __call__(self, block: nn.Module, state: BlockState, call: ModelCall, args: tuple, kwargs: dict) -> object:
        """Call `block`: the functions that other packs have put around the forward of its class, and inside these the code."""
        forward, self._outer, self.called_in = forward_inside(type(block)), forward_of_class(type(block)), call.began

        def run(module: nn.Module, *args: object, **kwargs: object) -> object:
            if module is not block:
                return forward(module, *args, **kwargs)
            self._came_in = call.began
            return self._call(functools.partial(forward, block), block, state, call, args, kwargs)

        return (rewrapped(self._outer, forward, run) or run)(block, *args, **kwargs)

    @property
    def bypassed(self) -> Failure | None:
        """Why no block reached the group's code in the last call of the model that called blocks of the group."""
        if self.called_in == self._came_in:
            return None
        reason = f"another node has replaced its forward by {named_origin(self._outer)}."
        return Failure(self.class_name, reason, OTHERS)

    def new_run(self) -> None:
        self._searches.clear()
        self.called_in = self._came_in
        self.code.reset_failure()

    def _call(
        self, uncompiled: Callable, block: nn.Module, state: BlockState, call: ModelCall, args: tuple, kwargs: dict
    ) -> object:
        at = None
        all_options: Any = kwargs.get("transformer_options")
        if all_options is None and self._options_at is not None and len(args) >= self._options_at:
            at = self._options_at - 1
            all_options = args[at]
        options, patches = state.options(all_options) if all_options else (all_options, [])
        self.code.patches, self.code.options = tuple(patches), state.options
        self._check_patches(patches)
        inputs, copies = in_usual_layout(args)
        shapes = shapes_of(inputs, kwargs)
        reason = why_eager(self, block, call, args, kwargs, shapes)
        if reason is not None:
            self.eager.add(reason)
            if reason is Eager.TRACE_TIME:
                call.uncompiled = call.put_off = True
            if reason is not Eager.FAILED:
                return uncompiled(*args, **kwargs)
            self.code.raise_if_stopped(self.failure_now)
            with torch.profiler.record_function(f"uncompiled {self.code.name}"):  # for benchmark/step_profile.py
                return uncompiled(*args, **kwargs)
        if self._is_in_vain(call, shapes):
            call.uncompiled = True
            call.put_off |= not (call.may_trace or self.code.is_being_lowered or self.code.limit_reached)
            return uncompiled(*args, **kwargs)
        with_options, traces, compiles = inputs, self.code.traces, self.code.compiles
        if at is not None:
            with_options = (*inputs[:at], options, *inputs[at + 1 :])
        elif all_options:
            kwargs = {**kwargs, "transformer_options": options}
        outside = forwards_outside(state.outside if not self.settings.fullgraph else ())
        try:
            with function_mode.paused(), sharing_classes(state.shared), outside:
                result = self._run(block, call, with_options, kwargs, shapes)
        finally:
            if options is not all_options:
                OptionsFilter.write_back(all_options, options)
            if all_options and state.options.is_whole and self.code.traces != traces:
                self.code.count_traces(shapes)
        if self.code.traces == traces:
            self._note_found((shapes, self.code.patches), call, compiles)
        for original, copy in copies:  # blocks may work in place (ldm/flux/layers.py: `img +=`)
            original.copy_(copy)
        return function_mode.in_channels_last(result)

    def _check_patches(self, patches: list[str]) -> None:
        """With `fullgraph` a patched call fails, other calls do not."""
        self.patched = None
        if patches and self.settings.fullgraph:
            reason = f"it has patches of other nodes ({', '.join(patches)}), which are called between two graphs."
            self.patched = Failure(self.class_name, reason, "Set fullgraph to false, or remove the patch.")
            if (message := self.patched.message()) not in self._said:  # other blocks of the group may have no patch
                self._said.add(message)
                logger.warning("%s", message)

    def _note_found(self, key: tuple, call: ModelCall, compiles: int) -> None:
        """Note whether a block that was not traced has found code. `compiles`: `BlockCode.compiles` before the call."""
        if not self.code.ran_uncompiled:
            call.ran_code, self._searches[key] = True, None
        elif call.may_trace or call.puts_off:  # else tracing has taken too long, and goes on in the next call
            self._searches.setdefault(key, (call.began, call.began, compiles))

    def _is_in_vain(self, call: ModelCall, shapes: tuple) -> bool:
        """Whether a search for code would be in vain: no block of the group found any for these shapes in an earlier call of
        the model. Then blocks run as without this pack, which is faster than the search and the operators of several graphs.
        The first block of each later call searches for all."""
        key = shapes, self.code.patches
        search = self._searches.get(key)
        if search is None or search[0] == call.began:  # other blocks may be traced in this call
            return False
        began, looked, compiles = search
        if looked != call.began:  # other guards may hold now
            self._searches[key] = began, call.began, compiles
            return False
        is_missing = self.code.is_being_lowered or not (call.may_trace or self.code.is_full)
        if call.synchronous or not is_missing or compiles != self.code.compiles:
            self._searches.pop(key, None)  # the thread of another GPU may have removed it
            return False
        return True

    def has_run(self, shapes: tuple) -> bool:
        """Whether the current code has run with inputs of these shapes."""
        return (self.code.version, *shapes) in self._seen

    def _run(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict, shapes: tuple) -> object:
        if self.has_run(shapes):
            return self.code.call(block, call, args, kwargs)
        with call.holding(first_call_lock):
            watching.renew()
            signature = self.code.version, *shapes
            result = self.code.call(block, call, args, kwargs)
            found_none = self.code.limit_reached and self.code.ran_uncompiled
            if self.failure_now is None and self.code.has_code and not (call.put_off or found_none):
                self._seen.add(signature)
        return result

    def record_varying_ints(self, block: nn.Module) -> None:
        """Record in which integers blocks of the group differ (VACE's `block_id`): these must not be constants of the graph."""
        numbers = {name: value for name, value in vars(block).items() if type(value) is int}
        if self.numbers is None:
            self.numbers = numbers
        self.code.varying.update(name for name, value in numbers.items() if self.numbers.get(name) != value)
