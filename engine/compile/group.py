"""Run the blocks of one group, which share compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..blocks import channels_last
from ..blocks.convolutions import Effort
from ..failures.describe import Failure
from ..options.code import NamedFunctions
from ..options.filter import OptionsFilter
from ..settings import CompileSettings
from .call_shapes import in_usual_layout, shapes_of
from .compiled_code import BlockCode, first_call_lock
from .eager import Eager, why_eager
from .session import CompileStats, watching


@dataclass(eq=False)
class BlockGroup:
    """Blocks of one class and structure, compiled once and called with the block as `self`.

    Holds no block and no weight: freeing the model frees them at once.

    Args:
        folder: name of its folder in the disk cache.
        patches: names of the patches inside the blocks. Each combination has a group of its own, made by the group without
            patches, so that what a patch costs or breaks ends with it.
        named: the functions that the blocks' code names, as they were when the group was last found.
        eager: why calls have run eager so far.
        _outside: the combinations of patches that are called outside of the graphs.
    """

    class_name: str
    forward: Callable
    settings: CompileSettings
    filter_options: OptionsFilter
    folder: str
    patches: tuple[str, ...] = ()
    patched: dict[tuple[str, ...], BlockGroup] = field(default_factory=dict)
    named: NamedFunctions = field(init=False)
    numbers: dict[str, int] | None = None
    varying: set[str] = field(default_factory=set)
    eager: set[Eager] = field(default_factory=set)
    _outside: set[tuple[str, ...]] = field(default_factory=set)
    _seen: set[tuple] = field(default_factory=set)

    def __post_init__(self) -> None:
        code = self.forward.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._options_at = names.index("transformer_options") if "transformer_options" in names else None
        name = f"{self.class_name} with {', '.join(self.patches)}" if self.patches else self.class_name
        self.code = BlockCode(name, self.forward, self.settings, (self.folder, self.class_name), self.varying)

    @property
    def stats(self) -> CompileStats:
        return self.code.stats

    @property
    def failure(self) -> Failure | None:
        return self.code.failure

    @property
    def limit_reached(self) -> bool:
        return self.code.limit_reached

    @property
    def is_being_compiled(self) -> bool:
        return self.code.is_being_lowered or any(group.is_being_compiled for group in self.patched.values())

    def __call__(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict, effort: Effort | None = None) -> object:
        at = None
        all_options: Any = kwargs.get("transformer_options")
        if all_options is None and self._options_at is not None and len(args) >= self._options_at:
            at = self._options_at - 1
            all_options = args[at]
        options: Any = all_options
        patches: tuple[str, ...] = ()
        if all_options:
            options, patches = self.filter_options(all_options, self._outside)
        group = self._for_patches(patches) if patches else self
        inputs, copies = in_usual_layout(args)
        shapes = shapes_of(inputs, kwargs)
        reason = why_eager(self, group, block, call, args, kwargs, shapes, effort)
        if reason is not None:
            self.eager.add(reason)
            if reason is Eager.TRACE_TIME:
                call.put_off_trace()
            if reason is not Eager.FAILED:
                return self.forward(block, *args, **kwargs)
            for code in (self.code, group.code):
                code.raise_if_stopped()
            with torch.profiler.record_function(f"uncompiled {group.code.name}"):  # for benchmark/step_profile.py
                return self.forward(block, *args, **kwargs)
        with_options, traces = inputs, group.code.traces
        if at is not None:
            with_options = (*inputs[:at], options, *inputs[at + 1 :])
        elif all_options:
            kwargs = {**kwargs, "transformer_options": options}
        try:
            with channels_last.paused():
                result = group._run(block, call, with_options, kwargs, shapes)
        finally:
            if options is not all_options:
                OptionsFilter.write_back(all_options, options)
            counted = call.may_trace and (patches or (all_options and self.filter_options.is_whole))
            if counted and group.code.is_traced_too_often(shapes, call, group.code.traces != traces):
                if patches not in self._outside and self.filter_options.moves(all_options, patches):
                    self._outside.add(patches)
                    group.code.discard()
                else:
                    group.code.give_up_tracing(shapes)
        for original, copy in copies:  # blocks may work in place (ldm/flux/layers.py: `img +=`)
            original.copy_(copy)
        return channels_last.result_channels_last(result)

    def _for_patches(self, patches: tuple[str, ...]) -> BlockGroup:
        if patches not in self.patched:
            group = BlockGroup(
                self.class_name, self.forward, self.settings, self.filter_options, self.folder, patches, varying=self.varying
            )
            self.patched[patches] = group
        return self.patched[patches]

    def has_run(self, shapes: tuple) -> bool:
        """Whether the code of now has run with inputs of these shapes."""
        return (self.code.version, *shapes) in self._seen

    def _run(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict, shapes: tuple) -> object:
        if self.has_run(shapes):
            return self.code.call(block, call, args, kwargs)
        with call.holding(first_call_lock):
            watching.renew()
            signature = self.code.version, *shapes
            result = self.code.call(block, call, args, kwargs)
            if self.failure is None and self.code.has_code and not call.put_off:
                self._seen.add(signature)
        return result

    def record_varying_ints(self, block: nn.Module) -> None:
        """Numbers in which blocks of the group differ must not be constants of the graph (VACE's `block_id`)."""
        numbers = {name: value for name, value in vars(block).items() if type(value) is int}
        if self.numbers is None:
            self.numbers = numbers
        self.varying.update(name for name, value in numbers.items() if self.numbers.get(name) != value)
