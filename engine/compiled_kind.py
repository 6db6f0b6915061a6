"""One compiled callable for all blocks of one kind."""

from __future__ import annotations

import logging
import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .block_options import OptionsFilter, patch_objects
from .errors import BlockCompileError
from .failures import Failure, describe_failure, is_limit_hit, never_swallowed
from .inductor import inductor
from .layouts import copies_of, has_odd_strides, is_transposed, shapes_of, sides_of_one, with_usual_strides
from .monitor import DYNAMIC, STATIC, CompileEvent, CompileStats, monitor, watching
from .prepare import wait_until_prepared
from .scopes import compile_scope
from .settings import CompileSettings

logger = logging.getLogger("torch-compile-kit")
# Two workers (multi-GPU) that meet a new shape at once would share PyTorch's process-wide settings and counters.
_first_call_lock = threading.RLock()
# More variants than this for the same shapes, under one set of patches: a patch that differs for each block or step.
PATCH_VARIANTS = 4


@dataclass
class CompiledKind:
    """Blocks of one class and structure, compiled once and called with the block as `self`.

    Holds no block and no weight: freeing the model frees them at once.

    Args:
        class_name: for reports.
        forward: the class's own forward function.
        settings: decides backend, options, shapes and limits.
        filter_options: see `block_options`.
        folder: name of its folder in the disk cache.
        patches: names of the patches inside the blocks. Each combination has a kind of its own, made by the kind without
            patches, so that what a patch costs or breaks ends with it.
    """

    class_name: str
    forward: Callable
    settings: CompileSettings
    filter_options: OptionsFilter
    folder: str
    patches: tuple[str, ...] = ()
    patched: dict[tuple[str, ...], CompiledKind] = field(default_factory=dict)
    stats: CompileStats = field(default_factory=CompileStats)
    failure: Failure | None = None
    limit_reached: bool = False
    first_shapes: set[tuple] = field(default_factory=set)
    numbers: dict[str, int] | None = None
    varying: set[str] = field(default_factory=set)
    compiles: int = 0
    patch_variants: Counter[tuple] = field(default_factory=Counter)
    _static: Callable | None = None
    _dynamic: Callable | None = None
    _seen: set[tuple] = field(default_factory=set)

    def __post_init__(self) -> None:
        code = self.forward.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._options_at = names.index("transformer_options") if "transformer_options" in names else None

    def __call__(self, block: nn.Module, first_shape: bool, args: tuple, kwargs: dict) -> object:
        """Run `block` compiled, or eager where that has failed before.

        Args:
            first_shape: the whole model runs at the first shape it was ever given (see `dynamic` = auto).
        """
        given = kwargs.get("transformer_options")
        at = None
        if given is None and self._options_at is not None and len(args) >= self._options_at:
            at = self._options_at - 1
            given = args[at]
        if not given:
            return self._run(block, first_shape, args, kwargs)
        options, patches = self.filter_options(given)
        kind = self._for_patches(patches) if patches else self
        if self.failure is not None or kind.failure is not None:
            return self.forward(block, *args, **kwargs)
        if at is None:
            kwargs = {**kwargs, "transformer_options": options}
        else:
            args = (*args[:at], options, *args[at + 1 :])
        compiles = kind.compiles
        try:
            return kind._run(block, first_shape, args, kwargs)
        finally:
            if options is not given:
                OptionsFilter.write_back(given, options)
            if patches and kind.compiles != compiles:
                kind._count_variant((shapes_of(args, kwargs), patch_objects(given)))

    def _for_patches(self, patches: tuple[str, ...]) -> CompiledKind:
        if patches not in self.patched:
            kind = CompiledKind(self.class_name, self.forward, self.settings, self.filter_options, self.folder, patches)
            kind.numbers, kind.varying = self.numbers, self.varying
            self.patched[patches] = kind
        return self.patched[patches]

    def _count_variant(self, variant: tuple) -> None:
        """Give up on a patch that makes the same blocks compile again and again for the same shapes."""
        self.patch_variants[variant] += 1
        if self.patch_variants[variant] <= PATCH_VARIANTS or self.failure is not None:
            return
        guard = self.stats.recompiles[-1].guard if self.stats.recompiles else "unknown"
        self._give_up(
            Failure(
                self._name(),
                f"compiled {PATCH_VARIANTS + 1} times for the same shapes.",
                "Other blocks and runs without this patch stay compiled.",
                guard,
            )
        )

    def _name(self) -> str:
        return f"{self.class_name} with {', '.join(self.patches)}" if self.patches else self.class_name

    def _give_up(self, failure: Failure) -> None:
        self.failure = failure
        logger.warning("%s", failure.message())

    def _run(self, block: nn.Module, first_shape: bool, args: tuple, kwargs: dict) -> object:
        if self.failure is not None:
            return self.forward(block, *args, **kwargs)
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and is_transposed(tensor):
                return self._run_contiguous(block, first_shape, args, kwargs)
            if isinstance(tensor, torch.Tensor) and has_odd_strides(tensor):
                return self._run(block, first_shape, tuple(map(with_usual_strides, args)), kwargs)
        signature = shapes_of(args, kwargs)
        if first_shape and signature not in self.first_shapes:
            self.first_shapes.add(signature)
            self._seen.discard(signature)
        if signature in self._seen:
            return self._call(self._callable(signature), block, args, kwargs)
        if self.limit_reached and self.settings.dynamic == "false":
            return self.forward(block, *args, **kwargs)
        with _first_call_lock:
            watching.renew()
            result = self._call(self._callable(signature), block, args, kwargs)
            if self.failure is None:
                self._seen.add(signature)
        return result

    def _run_contiguous(self, block: nn.Module, first_shape: bool, args: tuple, kwargs: dict) -> object:
        """The first block of a video model gets tokens as a view of a convolution's output; one copy saves it a graph."""
        copied = [(a, a.contiguous()) for a in args if isinstance(a, torch.Tensor) and is_transposed(a)]
        by_id = {id(original): copy for original, copy in copied}
        result = self._run(block, first_shape, tuple(by_id.get(id(a), a) for a in args), kwargs)
        for original, copy in copied:  # blocks may work in place (ldm/flux/layers.py: `img +=`)
            original.copy_(copy)
        return result

    def _callable(self, signature: tuple) -> Callable:
        """Static for the model's first shape in `auto`, dynamic for all others; one of the two otherwise."""
        dynamic = self.settings.dynamic
        if dynamic == "auto":
            dynamic = "false" if signature in self.first_shapes else "true"
        if dynamic == "false":
            if self._static is None:
                self._static = self._compile()
            return self._static
        if self._dynamic is None:
            self._dynamic = self._compile()
        return self._dynamic

    def _compile(self) -> Callable:
        """torch.compile of a private copy of the forward.

        PyTorch keeps compiled code per code object, with one limit for all users of it. A copy of the code gives each kind
        and setting its own, and frees it with this object.
        """
        self.stats.seconds += wait_until_prepared()
        source = self.forward
        own = types.FunctionType(
            source.__code__.replace(), source.__globals__, source.__name__, source.__defaults__, source.__closure__
        )
        own.__kwdefaults__ = source.__kwdefaults__
        own.__qualname__ = source.__qualname__
        return torch.compile(
            own,
            backend=inductor if self.settings.backend == "inductor" else self.settings.backend,
            fullgraph=self.settings.fullgraph,
            options=self.settings.inductor_options() or None,
        )

    def variants(self) -> list[object] | None:
        """The guards of the code that PyTorch holds now (a reset drops what was compiled); None where it does not tell."""
        if not hasattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list"):
            return None
        compiled = [c for c in (self._static, self._dynamic) if c is not None]
        entries = [entry for c in compiled for entry in _cache_entries(c._torchdynamo_orig_callable.__code__)]
        found = [entry.guard_manager for entry in entries]
        return [guards for guards in found if type(guards).__name__ != "DeletedGuardManagerWrapper"]

    def lacks_shared_code(self) -> bool:
        """Whether shapes ran only in code of the first size, and no other had sides of 1 (a batch of one) where they have."""
        first = {sides_of_one(s) for s in self._seen if s in self.first_shapes}
        return not first <= {sides_of_one(s) for s in self._seen if s not in self.first_shapes}

    def meet(self, block: nn.Module) -> None:
        """Note a block of this kind: numbers in which blocks differ must not be constants of the graph (VACE's `block_id`)."""
        numbers = {name: value for name, value in vars(block).items() if type(value) is int}
        if self.numbers is None:
            self.numbers = numbers
        self.varying.update(name for name, value in numbers.items() if self.numbers.get(name) != value)

    def _sources(self) -> str:
        """The numbers in which blocks differ, as Dynamo names them, after those that the user has set."""
        owner = self.forward.__code__.co_varnames[0]
        sources = [f"L['{owner}'].{name}" for name in sorted(self.varying)]
        return ",".join([s for s in (getattr(torch.compiler.config, "dynamic_sources", ""),) if s] + sources)

    def _switches(self, compiled: Callable) -> dict[str, object]:
        return {**(DYNAMIC if compiled is self._dynamic else STATIC), "dynamic_sources": self._sources()}

    def _call(self, compiled: Callable, block: nn.Module, args: tuple, kwargs: dict) -> object:
        """Call compiled code, and note what that compiles."""
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        event = CompileEvent(
            self._name(),
            lambda: before.extend(copies_of(args, kwargs)),
            lambda: self._switches(compiled),
            (self.folder, self.class_name),
        )
        limited = self.stats.graphs >= min(self.settings.variant_limit, 8)
        if limited:
            limit = self.settings.variant_limit
            compile_scope.enter(recompile_limit=limit, accumulated_recompile_limit=4 * limit, fail_on_recompile_limit_hit=True)
        monitor.calls.append(event)
        try:
            return compiled(block, *args, **kwargs)
        except Exception as error:
            if not is_limit_hit(error) and (not event.started or never_swallowed(error)):
                raise
            return self._after_failure(error, before, block, args, kwargs)
        finally:
            monitor.calls.pop()
            event.close()
            if limited:
                compile_scope.exit()
            if event.started:
                self.compiles += 1
                self.stats += event.stats()

    def _after_failure(self, error: Exception, before: list, block: nn.Module, args: tuple, kwargs: dict) -> object:
        """Run eager after compiling failed: on the inputs as they were, since part of the block may have run on them."""
        for tensor, copy in before:
            tensor.copy_(copy)
        if is_limit_hit(error):
            if not self.limit_reached:
                self.limit_reached = True
                changed = self.stats.recompiles[-1].guard.partition(": ")[2] if self.stats.recompiles else "unknown"
                logger.warning(
                    "%s: %d compiled variants, the limit; what changed last: %s. New shapes run eager; set cache_limit higher "
                    "or dynamic to true.",
                    self._name(),
                    self.settings.variant_limit,
                    changed.partition("  #")[0].strip().rstrip("."),
                )
            return self.forward(block, *args, **kwargs)
        failure = describe_failure(self._name(), error)
        if self.settings.on_failure == "stop":
            raise BlockCompileError(failure.message()) from error
        # An error of the model itself comes again here and is the user's to see, as without us.
        result = self.forward(block, *args, **kwargs)
        self._give_up(failure)
        return result


def _cache_entries(code: types.CodeType) -> list:
    """What PyTorch has compiled of a code object (torch/csrc/dynamo/eval_frame.c); a reset empties it."""
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
