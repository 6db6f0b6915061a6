"""Run the blocks of one group, which share compiled code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..cache.startup import is_preparing, wait_until_prepared
from ..failures.describe import Failure
from ..options.filter import OptionsFilter
from ..options.patches import changes_an_object
from ..settings import CompileSettings
from .call_shapes import has_odd_strides, is_transposed, shapes_of, with_usual_strides
from .compiled_code import BlockCode, first_call_lock
from .session import CompileStats, watching
from .traced_graph import is_capturing


@dataclass(eq=False)
class BlockGroup:
    """Blocks of one class and structure, compiled once and called with the block as `self`.

    Holds no block and no weight: freeing the model frees them at once.

    Args:
        folder: name of its folder in the disk cache.
        patches: names of the patches inside the blocks. Each combination has a group of its own, made by the group without
            patches, so that what a patch costs or breaks ends with it.
        fills_cache: calls have run eager because of a function that changes an object, see `options/patches.py`.
    """

    class_name: str
    forward: Callable
    settings: CompileSettings
    filter_options: OptionsFilter
    folder: str
    patches: tuple[str, ...] = ()
    patched: dict[tuple[str, ...], BlockGroup] = field(default_factory=dict)
    numbers: dict[str, int] | None = None
    varying: set[str] = field(default_factory=set)
    fills_cache: bool = False
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

    def __call__(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict) -> object:
        if changes_an_object(args, kwargs):
            self.fills_cache = True
            return self.forward(block, *args, **kwargs)
        all_options = kwargs.get("transformer_options")
        at = None
        if all_options is None and self._options_at is not None and len(args) >= self._options_at:
            at = self._options_at - 1
            all_options = args[at]
        if not all_options:
            return self._run(block, call, args, kwargs)
        options, patches = self.filter_options(all_options)
        group = self._for_patches(patches) if patches else self
        if self.failure is not None or group.failure is not None:
            return (group if self.failure is None else self).code.run_eager(block, args, kwargs)
        if at is None:
            kwargs = {**kwargs, "transformer_options": options}
        else:
            args = (*args[:at], options, *args[at + 1 :])
        traces = group.code.traces
        try:
            return group._run(block, call, args, kwargs)
        finally:
            if options is not all_options:
                OptionsFilter.write_back(all_options, options)
            if patches or self.filter_options.is_whole:
                group.code.count_variant(shapes_of(args, kwargs), call, group.code.traces != traces)

    def _for_patches(self, patches: tuple[str, ...]) -> BlockGroup:
        if patches not in self.patched:
            group = BlockGroup(
                self.class_name, self.forward, self.settings, self.filter_options, self.folder, patches, varying=self.varying
            )
            self.patched[patches] = group
        return self.patched[patches]

    def reset_failures(self) -> None:
        for group in (self, *self.patched.values()):
            group.code.reset_failure()

    def _run(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict) -> object:
        if self.failure is not None:
            return self.code.run_eager(block, args, kwargs)
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and is_transposed(tensor):
                return self._run_contiguous(block, call, args, kwargs)
            if isinstance(tensor, torch.Tensor) and has_odd_strides(tensor):
                return self._run(block, call, tuple(map(with_usual_strides, args)), kwargs)
        signature = (self.code.version, *shapes_of(args, kwargs))
        if signature in self._seen:
            return self.code.call(block, call, args, kwargs)
        if (self.limit_reached and self.settings.dynamic == "false") or _is_captured(args):
            return self.forward(block, *args, **kwargs)
        if call.synchronous:
            self.stats.seconds += wait_until_prepared(call.poll)
        elif is_preparing():
            call.uncompiled = True
            return self.forward(block, *args, **kwargs)
        with call.holding(first_call_lock):
            watching.renew()
            result = self.code.call(block, call, args, kwargs)
            if self.failure is None and self.code.has_code:
                self._seen.add(signature)
        return result

    def _run_contiguous(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict) -> object:
        """The first block of a video model gets tokens as a view of a convolution's output; copying them saves a graph."""
        copied = [(a, a.contiguous()) for a in args if isinstance(a, torch.Tensor) and is_transposed(a)]
        by_id = {id(original): copy for original, copy in copied}
        result = self._run(block, call, tuple(by_id.get(id(a), a) for a in args), kwargs)
        for original, copy in copied:  # blocks may work in place (ldm/flux/layers.py: `img +=`)
            original.copy_(copy)
        return result

    def record_varying_ints(self, block: nn.Module) -> None:
        """Numbers in which blocks of the group differ must not be constants of the graph (VACE's `block_id`)."""
        numbers = {name: value for name, value in vars(block).items() if type(value) is int}
        if self.numbers is None:
            self.numbers = numbers
        self.varying.update(name for name, value in numbers.items() if self.numbers.get(name) != value)


def _is_captured(args: tuple) -> bool:
    """Whether a CUDA graph is being captured, during which nothing may be traced."""
    first = args[0] if args else None
    return isinstance(first, torch.Tensor) and is_capturing(first.device)
