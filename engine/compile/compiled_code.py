"""Compile the forward of one block group and call it. If that fails, run the block eager, or raise with `on_failure` stop."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..background.model_call import ModelCall, next_moment
from ..background.thread import Job
from ..devices import is_capturing
from ..errors import BlockCompileError
from ..failures.describe import Failure, describe_failure, is_limit_hit, is_out_of_memory, never_swallowed
from ..log import logger
from ..ownership import is_of_another
from ..settings import CompileSettings
from ..torch_compat import private
from ..torch_settings import compile_scope
from ..transformer_options.filter import OptionsFilter
from .call_shapes import Changed, traced_state
from .session import (
    CALL_SWITCHES,
    DYNAMIC,
    STATIC,
    USUAL_LIMIT,
    CompileSession,
    CompileStats,
    are_settings_changed,
    monitor,
)
from .traced_graph import backend_for, dead_code, with_own_code

# Callbacks of the host. After a block failed to compile, each may exclude layers from its graphs and return True; then the
# block is traced again.
on_compile_failure: list[Callable[[nn.Module], bool]] = []
# The `next_moment` at which a callback last returned True.
_excluded_at = 0
# Called when a trace begins.
on_trace: list[Callable[[], None]] = []
OTHERS = "Other blocks stay compiled."
# How many later runs retry code that failed to compile for a reason that may have passed.
RETRIES = 3
# The most traces for the same shapes in one run, for a group with another pack's code that may read the options. After more the
# group is given up: that code reads a value that differs in each block or step.
TRACES_IN_RUN = 4
# Held in a call with new shapes: two such calls at once would share PyTorch's process-wide settings and counters.
first_call_lock = threading.RLock()


@dataclass(eq=False)
class BlockCode:
    """The compiled code of one block group.

    Args:
        name: for reports.
        varying: integer attributes that differ between blocks (VACE's `block_id`), and so must not be constants of the graph.
        lowering: seconds of the slowest lowering of a graph in this process.
        compiles: counts traces, lowerings of graphs and discards.
        jobs: one for each graph that waits for the worker or is being lowered.
        version: incremented when the code is discarded.
        writes_in_place: a graph writes to a tensor, which may be an input.
        failures: names of patches -> why calls with these patches run eager; () -> why all calls run eager.
        limit_reached: calls with new shapes run eager.
        is_full: PyTorch has refused another variant of a code object in this run. As each refusal takes milliseconds and logs a
            warning, no block is traced until the next run; blocks run the code that exists.
        patches: names of the patches inside the block in the current call; `options`: the filter of that block.
        breaks_alone: graph breaks of calls without patches.
        ran_uncompiled: in the last call a graph, or the whole block, ran uncompiled because there was no code.
        entries: names of the store's entries that hold the code (cache/code_store.py).
        why_inline: why a graph was lowered in the call that traced it; the last reason if there were several graphs.
        must_be_inline: key of a request (compile_process/obtain.py) -> why the call that traces the graph must lower it.
        _failed_with: names of patches -> `options` when calls with these patches failed.
        _retries: names of patches -> how often their failure was reset since code last ran with them. Counted apart: resets
            because another pack had restored a function that it had exchanged, as it may do so in each call.
        _traces_in_run: shapes -> traces for them in this run.
        _traced: result of `traced_state` -> number of graphs.
        _traced_from: start (`ModelCall.began`) of the last call of the model that traced the block.
        _has_variants: PyTorch held code of the forward after its last trace. If Dynamo skips the forward, as after some graph
            breaks, PyTorch holds code only of the functions that the forward calls.
    """

    name: str
    forward: Callable
    settings: CompileSettings
    varying: set[str] = field(default_factory=set)
    lowering: float = 0.0
    compiles: int = 0
    traces: int = 0
    stats: CompileStats = field(default_factory=CompileStats)
    jobs: set[Job] = field(default_factory=set)
    is_tracing: bool = False
    version: int = 0
    writes_in_place: bool = False
    failures: dict[tuple[str, ...], Failure] = field(default_factory=dict)
    limit_reached: bool = False
    is_full: bool = False
    why_inline: str | None = None
    must_be_inline: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    options: OptionsFilter | None = None
    breaks_alone: int = 0
    ran_uncompiled: bool = False
    entries: set[str] = field(default_factory=set)
    _failed_with: dict[tuple[str, ...], OptionsFilter | None] = field(default_factory=dict)
    _retries: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _traces_in_run: Counter[tuple] = field(default_factory=Counter)
    _traced: Counter[tuple] = field(default_factory=Counter)
    _traced_from: int = 0
    _has_variants: bool = False
    _block: weakref.ref[nn.Module] | None = None
    _function: Callable | None = None
    _compiled: Callable | None = None

    @property
    def is_being_lowered(self) -> bool:
        for job in list(self.jobs):
            if job.over:
                self.jobs.discard(job)
        return bool(self.jobs)

    @property
    def is_only_read(self) -> bool:
        """Whether the code of all graphs that have none yet is on disk, and only has to be read."""
        return all(job.is_kept for job in list(self.jobs) if not job.over)

    def count_lowered(self, seconds: float, from_disk: int, name: str | None = None) -> None:
        """Called when a graph has been lowered, on any thread; `name`: of the entry that holds the code."""
        if name is not None:
            self.entries.add(name)
        if not from_disk:
            self.lowering = max(self.lowering, seconds)
        self.stats.add(CompileStats(seconds=seconds, from_disk=from_disk))
        self.compiles += 1

    @property
    def failure(self) -> Failure | None:
        """Why all calls run eager."""
        return self.failures.get(())

    @property
    def has_code(self) -> bool:
        return self._compiled is not None

    def call(self, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict) -> object:
        """Call the compiled block, and count its traces."""
        self.ran_uncompiled = False
        compiled = self._compiled  # the worker may discard it
        if compiled is None:
            if _excluded_at > call.began:  # excluded layers are left out from the model's next call on
                self.ran_uncompiled = call.uncompiled = True
                return self.forward(block, *args, **kwargs)
            try:
                compiled = self._compiled = self._compile()
            except Exception as error:  # from PyTorch, before the block is traced
                return self._run_plain(block, args, kwargs, self._failure_of(error))
        function = self._function
        may_trace = call.may_trace and not self.is_full
        if not may_trace and function is not None:
            compiled = private.run(function)
        self._block = weakref.ref(block)
        changed = Changed((args, kwargs))
        if self.writes_in_place and (self.breaks_alone or (self.patches and self.stats.graph_breaks)):
            changed.keep()  # the first graph may have run and written to arguments before a later one fails
        traces_for: set[tuple] = set()
        session = CompileSession(
            self.name,
            functools.partial(self._trace_begins, changed, call),
            functools.partial(self._switches, block, args, kwargs, traces_for),
            (args, kwargs),
            call,
        )
        if call.settings_changed is None:
            call.settings_changed = are_settings_changed()
        limited = call.settings_changed or self.stats.graphs >= min(self.settings.variant_limit, USUAL_LIMIT)
        if limited:
            limit = self.settings.variant_limit
            limits = {"recompile_limit": limit, "accumulated_recompile_limit": 4 * limit, "fail_on_recompile_limit_hit": True}
            compile_scope.enter(**CALL_SWITCHES, **limits)
        monitor.calls.append(session)
        failure = None
        try:
            session.hold()
            result = compiled(block, *args, **kwargs)
        except Exception as error:
            is_compilers, has_run = isinstance(error, private.BackendCompilerFailed), session.has_run
            lacks_memory = has_run and changed.has_copies and is_out_of_memory(error) and not is_compilers
            if is_of_another(error) or is_capturing():
                lacks_memory = False
            session.release()
            if lacks_memory:
                self.ran_uncompiled = call.uncompiled = True
            else:
                # For the host a compiler's error is never out of memory, and the image does not need the compiler's memory.
                for_host = never_swallowed(error) and not is_compilers
                if is_of_another(error) or (not is_limit_hit(error) and (not session.started or for_host)):
                    raise
                has_breaks = self.patches or self.breaks_alone or (session.started and session.stats().graph_breaks)
                if isinstance(error, BlockCompileError) or ((has_run or has_breaks) and not changed.can_be_put_back):
                    raise
                if is_limit_hit(error):
                    self._reach_limit()
                    self.ran_uncompiled = True
                elif self._excludes_layers(error, block, call.began):
                    self.discard()
                    self.ran_uncompiled = call.uncompiled = True
                else:
                    failure = self._failure_of(error)
        else:
            self._traced.update(traces_for)
            if self._retries and session.has_run and not self.ran_uncompiled:
                self._retries.pop(self.patches, None)
            if not (session.has_run or may_trace):
                self.ran_uncompiled = True
                call.uncompiled |= not self.is_full
                call.put_off |= not self.limit_reached  # at the limit no trace will come
            return result
        finally:
            monitor.calls.pop()
            session.release()
            if limited:
                compile_scope.exit()
            if session.is_loose:
                self.discard()
                self.give_up(Failure(self.name, "PyTorch's settings could not be set for its trace (see the log).", OTHERS))
            if session.started:
                self.is_tracing = False
                self.compiles += 1
                self.traces += 1
                self._has_variants = bool(self.variants())
                call.traced += session.seconds
                added = session.stats()
                self.stats.add(added)
                self.breaks_alone += 0 if self.patches else added.graph_breaks
        # Not in `except`, where the error keeps alive what graphs and compiler have allocated: the copies may fill the memory.
        changed.put_back()
        del changed, session
        return self._run_plain(block, args, kwargs, failure)

    def _trace_begins(self, changed: Changed, call: ModelCall) -> None:
        self.is_tracing, self._traced_from = True, call.began
        changed.keep()
        for tell in on_trace:
            tell()

    def reset_trace_counts(self) -> None:
        """Called before a graph is traced again because its call must lower it: that trace says nothing about the block."""
        self._traces_in_run.clear()

    def lowered_in_call(self, reason: str) -> None:
        """Called when a graph is lowered in the call that traced it."""
        if self.why_inline != reason:
            self.why_inline = reason
            logger.info("%s", self.inline_in_words())

    def inline_in_words(self) -> str:
        return f"{self.name} was compiled in the call that needed it, which waited: {self.why_inline}."

    def lowering_failed(self, error: Exception, version: int) -> None:
        """Called, usually on the worker, when a graph could not be lowered: calls run it operator by operator.

        Args:
            version: of the code when the graph was traced; an error of discarded code is ignored.
        """
        if version != self.version:
            return
        block = self._block() if self._block is not None else None
        if block is not None and self._excludes_layers(error, block, self._traced_from):
            self.discard()
        else:
            self.give_up(describe_failure(self.name, error))

    def _excludes_layers(self, error: Exception, block: nn.Module, since: int) -> bool:
        """Exclude layers that may have caused the error. True if any were excluded after `since`; False if a callback fails."""
        global _excluded_at
        try:
            if describe_failure(self.name, error).may_pass:
                return False
            if any(exclude(block) for exclude in on_compile_failure):
                _excluded_at = next_moment()
        except Exception:
            logger.warning("%s: after an error another one", self.name, exc_info=True)
            return False
        return _excluded_at > since

    def discard(self) -> None:
        """Forget the code; the next call traces the block again."""
        if self._function is not None:
            dead_code.append(self._function.__code__)
        self._function = self._compiled = None
        self._has_variants = False
        self._traced.clear()
        self.limit_reached = self.is_full = False
        self.version += 1
        self.compiles += 1  # so that CUDA graphs of the code are dropped as well

    def raise_if_stopped(self, failure: Failure | None = None) -> None:
        """Raise `failure`, or else the code's own failure, if the user has set `on_failure` to stop."""
        failure = failure or self.failure
        if failure is not None and self.settings.on_failure == "stop":
            raise BlockCompileError(failure.message())

    def _failure_of(self, error: Exception) -> Failure:
        """Describe a compiler's error. Raises BlockCompileError if the user has set `on_failure` to stop."""
        failure = describe_failure(self.name, error)
        if self.settings.on_failure == "stop":
            self._fails(self.patches, failure)
            raise BlockCompileError(failure.message()) from error
        return failure

    def _run_plain(self, block: nn.Module, args: tuple, kwargs: dict, failure: Failure | None) -> object:
        """Run the forward uncompiled after compiling has failed, and note `failure`."""
        # If the error is the model's own, this raises it again, and the user sees it as without this pack.
        result = self.forward(block, *args, **kwargs)
        if failure is not None:
            self._fails(self.patches, failure)
            logger.warning("%s", failure.message())
        return result

    def give_up(self, failure: Failure) -> None:
        self._fails((), failure)
        logger.warning("%s", failure.message())

    def _fails(self, patches: tuple[str, ...], failure: Failure) -> None:
        self.failures[patches], self._failed_with[patches] = failure, self.options

    def reset_failure(self) -> None:
        """Called when a run begins. Retry, up to RETRIES times, what failed for a reason that may have passed (a full disk,
        functions that another pack had exchanged); discard code that a reset of Dynamo removed; try again to exceed the limit.
        """
        self._traces_in_run.clear()
        self.is_full = False
        if self._has_variants and private.compile_lock.acquire(blocking=False):  # else another thread compiles
            try:
                was_reset = not self.variants()
            finally:
                private.compile_lock.release()
            if was_reset:
                self.discard()
        for patches, failure in list(self.failures.items()):
            options = self._failed_with.get(patches)
            was_exchanged = options is not None and not options.is_current()
            tries = patches if failure.may_pass else ("a function was exchanged", *patches)
            if (failure.may_pass or was_exchanged) and self._retries[tries] < RETRIES:
                self._retries[tries] += 1
                del self.failures[patches]

    def _reach_limit(self) -> None:
        """Run new shapes eager from now on."""
        self.is_full = True
        if not self.limit_reached:
            self.limit_reached = True
            guard = self.stats.recompiles[-1] if self.stats.recompiles else ""
            changed = guard.partition(": ")[2] or "unknown"
            logger.warning(
                "%s: compiled %d times, the limit; what changed last: %s. New shapes run uncompiled; set cache_limit higher "
                "or dynamic to true.",
                self.name,
                self.settings.variant_limit,
                changed.partition("  #")[0].strip().rstrip("."),
            )

    def count_traces(self, shapes: tuple) -> None:
        """Called when a call with these shapes has traced."""
        self._traces_in_run[shapes] += 1
        if self._traces_in_run[shapes] > TRACES_IN_RUN and self.failure is None:
            reason = (
                f"traced {self._traces_in_run[shapes]} times for the same shapes: it reads what differs in each block or step."
            )
            self.give_up(Failure(self.name, reason, OTHERS))

    def _compile(self) -> Callable:
        """torch.compile of a copy of the forward, so that each group and setting has its own limit and can free its code."""
        function = self._function = with_own_code(self.forward)
        weakref.finalize(self, dead_code.append, function.__code__).atexit = False
        backend = backend_for(self, self.settings.backend, self.settings.inductor_options())
        return torch.compile(function, backend=backend, fullgraph=self.settings.fullgraph)

    def variants(self) -> list[object]:
        """The guards of the code that PyTorch holds now: none after Dynamo was reset."""
        function = self._function  # the worker may discard it
        entries = private.cache_entries(function.__code__) if function is not None else []
        guards = [entry.guard_manager for entry in entries]
        return [guard for guard in guards if type(guard).__name__ != "DeletedGuardManagerWrapper"]

    def _switches(
        self, block: nn.Module, args: tuple, kwargs: dict, traces_for: set[tuple], sources: list[str] | None
    ) -> dict[str, object]:
        """Settings of a trace: whether sizes vary, and which numbers: those in which blocks differ, and those that users named.

        Floats are constants until they are seen to differ: as a symbol, the epsilon of a norm made PyTorch trace a block twice
        (torch/fx/passes/_tensorify_python_scalars.py), and a graph with such symbols is lowered in the call that traces it.
        `traces_for` gets the `traced_state` of the call. If two calls have traced for the same state, a float differs.
        `sources`: for a graph that is traced alone, the inputs that varied in the block's trace; weights count as inputs.
        """
        if not self.variants():  # Dynamo was reset
            self._traced.clear()
        shapes = STATIC if self.settings.dynamic == "false" or sources is not None else DYNAMIC
        if sources is None:
            traced_for = traced_state(block, args, kwargs)
            if self.settings.dynamic != "false":
                shapes = {**shapes, "specialize_float": self._traced[traced_for] < 2}
            traces_for.add(traced_for)
            owner = self.forward.__code__.co_varnames[0]
            sources = [f"L['{owner}'].{name}" for name in sorted(self.varying)]
        named = getattr(torch.compiler.config, "dynamic_sources", "")
        return {**shapes, "dynamic_sources": ",".join([*([named] if named else []), *sources])}


def free_unused() -> None:
    """Free the compiled code of `dead_code`, which PyTorch keeps for ever.

    PyTorch's `orig_code_map` keeps a code object alive as long as its compiled code lives, and the code object keeps the
    compiled code alive: graphs, guards and a name in the module of the block's class would stay for each freed model.
    """
    while dead_code:
        private.reset_code(dead_code.pop())
    # PyTorch never clears `_edits` either: after a trace inside a block's call, the stacks in that list hold the block's code.
    if (metrics := private.get_metrics_context()) is not None and not metrics.in_progress():
        getattr(metrics, "_edits", []).clear()
