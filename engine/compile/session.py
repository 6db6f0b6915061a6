"""Notice and count compilations, and scope PyTorch's settings while a block is traced.

PyTorch calls back on the thread that compiles (torch/_dynamo/callback.py). Each call into compiled code puts a session on a
stack of its thread (`monitor.calls`). A compilation belongs to the topmost session. A session costs a list append.
"""

from __future__ import annotations

import enum
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..background.model_call import ModelCall
from ..devices import is_capturing
from ..log import logger
from ..ownership import depth_of_foreign
from ..torch_compat import private
from ..torch_settings import SharedScope, compile_scope
from ..transformer_options.outside import HOLDER
from .call_shapes import static_heads


@dataclass
class CompileStats:
    """What compiling has cost so far.

    Args:
        recompiles: for each recompilation the first guard that failed, as PyTorch words it.
        from_disk: for how many graphs kept code was used.
    """

    graphs: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    recompiles: list[str] = field(default_factory=list)
    breaks: Counter[str] = field(default_factory=Counter)
    from_disk: int = 0

    def add(self, other: CompileStats) -> None:
        self.graphs += other.graphs
        self.graph_breaks += other.graph_breaks
        self.seconds += other.seconds
        self.recompiles += other.recompiles
        self.from_disk += other.from_disk
        self.breaks.update(dict(other.breaks))  # a copy: other threads may count meanwhile

    def __add__(self, other: CompileStats) -> CompileStats:
        total = CompileStats()
        total.add(self)
        total.add(other)
        return total

    def __sub__(self, earlier: CompileStats) -> CompileStats:
        return CompileStats(
            self.graphs - earlier.graphs,
            self.graph_breaks - earlier.graph_breaks,
            self.seconds - earlier.seconds,
            self.recompiles[len(earlier.recompiles) :],
            Counter(self.breaks) - earlier.breaks,
            self.from_disk - earlier.from_disk,
        )


# In force while a block is traced. use_duck_shape would tie sizes that are equal by chance (cfg's batch and RoPE's 2x2). With
# either dict-tag shortcut, the strides of a weight may change unnoticed through `.data` (pytorch#181873). The two captures keep
# mixtures of experts, which pick tokens by mask, in one graph. Without guards on default values, which PyTorch skips before
# pytorch#178420, a patch would keep the strength that it had first. With sizes that vary, filling the cache of fake tensors
# takes a quarter of a trace, and no lookup ever hits.
COMPILE_SWITCHES = {
    "use_duck_shape": False,
    "fake_tensor_cache_enabled": False,
    "use_recursive_dict_tags_for_guards": False,
    "skip_guards_on_constant_func_defaults": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    # PyTorch's defaults, which another pack may have changed. Then weights would become constants, each block would need a
    # graph of its own, or a number that varies would have the graph lowered in the call.
    "freezing": False,
    "prepare_freezing": False,
    "install_free_tensors": False,
    "inline_inbuilt_nn_modules": True,
    "allow_unspec_int_on_nn_module": False,
}
# PyTorch reads these also before a trace begins and after it has failed. Setting them around each call of a block takes 40 µs.
CALL_SWITCHES = {"suppress_errors": False, "error_on_recompile": False}
USUAL_LIMIT = 8  # of PyTorch's `recompile_limit`


def are_settings_changed() -> bool:
    """Whether another pack has changed `CALL_SWITCHES`, or lowered a limit of graphs, for the process."""
    config = private.dynamo_config
    limits = getattr(config, "recompile_limit", USUAL_LIMIT), getattr(config, "accumulated_recompile_limit", USUAL_LIMIT)
    changed = getattr(config, "suppress_errors", False) or getattr(config, "error_on_recompile", False)
    return changed or min(limits) < USUAL_LIMIT


# What torch.compile(dynamic=...) sets around each call (torch/_dynamo/eval_frame.py, make_set_enable_dynamic), and leaves
# behind where two threads are in compiled code at once. Here these settings hold only during a trace.
STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
DYNAMIC = {"assume_static_by_default": False}


# Before 2.15, Dynamo silently says that a constant is not in a list of numbers that may vary (`1 in cond_or_uncond`,
# pytorch#153366). While a block is traced, `contains` runs instead: the same result, from steps that Dynamo can follow.
_iter_contains = private.iter_contains


def contains(items: tuple, wanted: object) -> bool:
    """`wanted in items`; which item matches becomes a constant."""
    for item in items:  # noqa: SIM110  in plain steps, for Dynamo
        if item == wanted:
            return True
    return False


def traceable_contains(items: Iterable, search: Any, translator: Any, *options) -> Any:
    """In place of `iter_contains` of torch/_dynamo/variables/lists.py."""
    items = list(items)
    if not search.is_python_constant() or not any(map(_may_vary, items)):
        return _iter_contains(items, search, translator, *options)
    variables = private.variables
    function = variables.VariableTracker.build(translator, contains)
    return function.call_function(translator, [variables.TupleVariable(items), search], {})


def _may_vary(value: Any) -> bool:
    """Whether `value` is a size that varies, or a list with one inside."""
    value = value.realize()
    if isinstance(value, private.variables.BaseListVariable):
        return any(map(_may_vary, value.items))
    return isinstance(value, private.variables.SymNodeVariable) and isinstance(value.sym_num, torch.SymInt)


# Before 2.15, a number, a text, None or an Enum that is read through its class (`State.strength`) becomes a constant without a
# guard (pytorch#176851), so that compiled code of another pack would keep its first value.
_attribute_of_class = private.attribute_of_class


def guarded_attribute(class_variable: Any, translator: Any, name: str) -> Any:
    """In place of `UserDefinedClassVariable.var_getattr` of torch/_dynamo/variables/user_defined.py."""
    result, cls = _attribute_of_class(class_variable, translator, name), class_variable.value
    has_guard = class_variable.source is None or result.source is not None or not result.is_python_constant()
    if has_guard or name.startswith("__") or issubclass(cls, enum.Enum) or cls.__module__.startswith("torch"):
        return result
    try:
        value = getattr(cls, name)
    except AttributeError:  # Dynamo takes an attribute that a class with a metaclass lacks for None
        return result
    return private.variables.VariableTracker.build(translator, value, private.AttrSource(class_variable.source, name))


# After a graph break in a loop, Dynamo runs the whole function uncompiled, unless `maybe_has_backedge` finds no loop. Both
# answers give right code (torch/_dynamo/symbolic_convert.py). The host calls patches in loops, over lists of one or two.
_maybe_has_backedge = private.maybe_has_backedge


def _has_loop(self: Any) -> bool:
    return not (monitor.calls and monitor.calls[-1].is_patched) and _maybe_has_backedge(self)


# What is replaced or switched off while Dynamo traces. All of this is process-wide; Dynamo traces on one thread at a time
# (`compile_lock`). `get_funcname` tokenizes each source file that is traced, for a debug log: 0.7 of the first 2 s of Flux.
# `profile_guard_manager` runs the guards of a new graph once more, for a debug log. The garbage collector takes 0.3 s to visit
# what the host and its nodes have loaded.
_REPLACED = "iter_contains", "attribute_of_class", "get_funcname", "profile_guard_manager", "maybe_has_backedge"
tracing_scope = SharedScope(
    {
        **{name: private.switch(name) for name in _REPLACED},
        "gc": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    }
)
TRACING = {
    "iter_contains": traceable_contains,
    "attribute_of_class": guarded_attribute,
    "get_funcname": lambda *_: None,
    "profile_guard_manager": lambda *_: 0.0,
    "maybe_has_backedge": _has_loop,
    "gc": False,
}
# How long a call waits for another thread to release PyTorch's lock (`compile_lock`): a reset takes milliseconds.
LOCK_SECONDS = 0.5
_is_long_held = False


@dataclass(eq=False)
class CompileSession:
    """The traces inside one call of a block.

    Args:
        block: the block's name, for reports.
        on_first: called before the first trace.
        switches: called with `sources`; returns settings of PyTorch for this block beside `COMPILE_SWITCHES`.
        arguments: positional and keyword arguments of the call.
        call: the model's call in progress.
        sources: if a graph of the block is traced alone, Dynamo's names of the inputs whose sizes vary.
        is_held: this call holds PyTorch's lock, see `hold`.
        has_run: a graph has run.
        is_loose: a trace was made without `COMPILE_SWITCHES`, after an error in this pack: guards may miss what changes.
        depth: `depth_of_foreign` where the call was made.
    """

    block: str
    on_first: Callable[[], None]
    switches: Callable[[list[str] | None], dict[str, object]]
    arguments: tuple[tuple, dict]
    call: ModelCall
    started: bool = False
    graphs: int = 0
    seconds: float = 0.0
    sources: list[str] | None = None
    is_held: bool = False
    has_run: bool = False
    is_loose: bool = False
    depth: int = field(default_factory=depth_of_foreign)
    _began: float = 0.0
    _scopes: ExitStack = field(default_factory=ExitStack)

    @property
    def is_patched(self) -> bool:
        """Whether the block gets patches of other nodes."""
        args, kwargs = self.arguments
        return any(isinstance(value, dict) and HOLDER in value for value in (*args, *kwargs.values()))

    def start(self) -> None:
        self._began = time.perf_counter()  # first: PyTorch calls `end` whether or not the rest succeeds
        is_loose, self.is_loose = self.is_loose, True
        is_first, self.started = not self.started, True
        if is_first:
            self._breaks = private.counters["graph_break"].copy()
            self._metrics = private.get_compilation_metrics()  # kept, to compare ids: numbers restart when Dynamo is reset
        try:
            with ExitStack() as scopes:  # all of them or, after an error, none
                scopes.enter_context(compile_scope.applied(**COMPILE_SWITCHES, **self.switches(self.sources)))
                scopes.enter_context(tracing_scope.applied(**TRACING))
                scopes.enter_context(static_heads(*self.arguments))
                self._scopes = scopes.pop_all()
            self.is_loose = is_loose
        finally:
            if is_first:
                self.on_first()

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        self._scopes.close()

    def hold(self) -> None:
        """Hold PyTorch's lock while PyTorch searches for code that fits and, after a trace, until the new code is stored.

        If another node reset Dynamo meanwhile, on another thread, the process would end. PyTorch itself holds the lock while it
        traces. A thread that holds the lock for long is compiling, which is no danger, so the call goes on without the lock.
        A CUDA graph capture takes no lock: nothing is traced then, and the capture holds another lock, for which threads wait.
        """
        global _is_long_held
        if is_capturing():
            return
        self.is_held = private.compile_lock.acquire(timeout=0.0 if _is_long_held else LOCK_SECONDS)
        _is_long_held = not self.is_held

    def release(self) -> None:
        """Called when a graph runs, and at the end of the block's call."""
        self.has_run = True
        if self.is_held:
            self.is_held = False
            private.compile_lock.release()

    def stats(self) -> CompileStats:
        """What this call traced; PyTorch's counter of graphs also counts those of other threads, such as the warm-up's."""
        breaks = private.counters["graph_break"] - self._breaks
        before = set(map(id, self._metrics))
        metrics = [m for m in private.get_compilation_metrics() if id(m) not in before]
        recompiles = [m.recompile_reason for m in metrics if m.recompile_reason]
        return CompileStats(self.graphs, sum(breaks.values()), self.seconds, recompiles, breaks)


class _Monitor(threading.local):
    """The calls in progress on this thread, innermost last, and how often one of them compiled.

    `listener` is called with the block's class name when a compilation begins, and with None when it ends.
    """

    def __init__(self) -> None:
        self.calls: list[CompileSession] = []
        self.compilations = 0
        self.listener: Callable[[str | None], None] | None = None

    def tell(self, block: str | None) -> None:
        if self.listener is not None:
            self.listener(block)


monitor = _Monitor()


def _is_compilation(args: object) -> bool:
    """Whether a callback is for a compilation of ours. From 2.8 on PyTorch also calls back when it tunes a kernel or records a
    CUDA graph, and other packs' code that a block calls may be compiled by itself, with their settings."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "DYNAMO")
    is_ours = bool(monitor.calls) and monitor.calls[-1].depth == depth_of_foreign()
    return is_ours and trigger in ("DYNAMO", "LAZY_BACKWARD")


def _on_compile_start(args: object = None) -> None:
    if _is_compilation(args):
        monitor.compilations += 1
        with _errors_logged("a compilation is not counted"):
            monitor.calls[-1].start()
        with _errors_logged("the start of a compilation was not announced"):
            monitor.tell(monitor.calls[-1].block)


def _on_compile_end(args: object = None) -> None:
    if _is_compilation(args):
        with _errors_logged("a compilation was not counted"):
            monitor.calls[-1].end()
        with _errors_logged("the end of a compilation was not announced"):
            monitor.tell(None)


@contextmanager
def _errors_logged(message: str) -> Iterator[None]:
    """Log errors of ours: raised in PyTorch's callback, they would leave a compilation pending for ever, for every pack."""
    try:
        yield
    except Exception:
        logger.exception("%s", message)


class _Watching:
    """Keep the two callbacks registered while any model samples."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
        self.renew()

    def renew(self) -> None:
        """Register the callbacks again if a reset of Dynamo has removed them."""
        with self._lock:
            if self._users and _on_compile_start not in private.callback_handler.start_callbacks:
                private.callback_handler.register_start_callback(_on_compile_start)
                private.callback_handler.register_end_callback(_on_compile_end)

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(ValueError):  # a reset has removed them
                    private.callback_handler.remove_start_callback(_on_compile_start)
                    private.callback_handler.remove_end_callback(_on_compile_end)


watching = _Watching()
