"""Run a graph as soon as Dynamo has traced it, and swap compiled code in when it is there.

torch.compile lowers a graph (AOTAutograd, inductor, Triton or C++) inside the call that traced it, so the first image waits for
minutes. Tracing later, on a copy and on another thread, misses what holds only during the call: contexts, hooks, functions that
ComfyUI or another node swaps. So:

1. Dynamo traces the block in the call, where its guards hold, and hands the FX graph to `TracedGraph` as to any backend. All
   that determines the code is serialized at once (`request_for`, compile_process/obtain.py); no fake tensor is kept.
2. If the code was loaded ahead (compile_process/load_ahead.py), it runs. Else the first run makes a job. A synchronous call
   waits for that job. Any other goes on at once: the FX graph runs operator by operator, as exact and as slow as uncompiled
   code, and the job is queued when the model's call is over.
3. The worker thread gets the code from the store, or has the compile process lower the graph (`obtain`).
4. The worker loads the code, then loads and tunes the kernels on zeros. Meanwhile it holds the device's lock of `gpu_locks`,
   since either would break a CUDA graph capture on another thread.
5. The code is published, and runs from then on wherever Dynamo's guards and those added by lowering hold. For other sizes
   Dynamo traces the graph again, as it would have traced the block.

A graph whose lowering fails keeps running operator by operator, and `BlockCode` decides what becomes of its group. These are
lowered in the call that traced them (`lowered_inline`): graphs that cannot be serialized, such as those with a backward; graphs
with numbers that vary (PyTorch restarts the trace for some); graphs of other backends than inductor; and all graphs where no
process can be started. Where only the compile process finds that out, the next call traces that graph again.

The `owner` of a graph is its `BlockCode`, whose module imports this one: hence `Any`.
"""

import copy
import errno
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..background.thread import Job, compiler
from ..compile_process import lowering_settings
from ..compile_process.artefact import Code, LowerInline
from ..compile_process.client import Unavailable, compile_process
from ..compile_process.inputs import is_weight
from ..compile_process.load_ahead import ready_for
from ..compile_process.obtain import Request, holds, import_ahead, is_on_disk, load, obtain, request_for, wait_for_imports
from ..devices import gpu_locks, is_capturing
from ..failures.describe import DescribedError, chain, describe_failure, in_one_line, is_out_of_memory, never_swallowed
from ..inductor.backend import inductor, needs_gradients
from ..log import logger
from ..out_of_place import out_of_place, written_by
from ..tensor_spec import is_symbol
from ..torch_compat import private
from .call_shapes import Changed
from .session import monitor, tracing_scope

# Up to PyTorch 2.11 inductor's options are process-wide, so only one thread at a time may lower inline.
_inline_lock = threading.Lock()


# Code objects of freed graphs, whose compiled code PyTorch would keep; see `compiled_code.free_unused`.
dead_code: list[types.CodeType] = []


def backend_for(owner: Any, name: str, options: dict) -> Callable:
    """A backend of torch.compile for one owner; it lowers with the registered backend `name`, or with `inductor/backend.py`."""
    reference = weakref.ref(owner)  # PyTorch's table of compiled code would keep the owner alive

    def backend(graph: fx.GraphModule, example_inputs: list, refusal: str | None = None) -> Callable:
        """`refusal`: why the call must lower the graph."""
        prepare(graph, example_inputs)
        monitor.calls[-1].graphs += 1
        owner: Any = reference()  # alive: a call of it traces the graph
        owner.writes_in_place |= any(map(written_by, graph.graph.nodes))
        lower = functools.partial(inductor, options=options) if name == "inductor" else private.lookup_backend(name)
        try:
            if refusal is not None:
                raise LowerInline(refusal)
            request = _request_for(name, owner, graph, example_inputs, options)
        except (LowerInline, private.MissingName) as error:
            if name in LOWERERS:
                owner.lowered_in_call(str(error))
            return lowered_inline(owner, graph, example_inputs, lower)
        return TracedGraph(owner, graph, example_inputs, request, LOWERERS[name], backend)

    backend.__name__ = name
    return backend


def prepare(graph: fx.GraphModule, example_inputs: list) -> None:
    """Rewrite in-place sums where gradients are wanted, see `out_of_place.py`."""
    if needs_gradients(example_inputs) and out_of_place(graph.graph):
        graph.recompile()


def _has_varying_numbers(graph: fx.GraphModule, inputs: list) -> bool:
    """Whether a float is an input: Dynamo passes it as a tensor and reads it with `item()`."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(value, torch.Tensor)
        and (value.ndim, value.dtype) == (0, torch.float64)
        and any(user.op == "call_method" and user.target == "item" for user in node.users)
        for node, value in zip(placeholders, inputs, strict=True)
    )


def _request_for(name: str, owner: Any, graph: fx.GraphModule, inputs: list, options: dict) -> Request:
    if name not in LOWERERS:
        raise LowerInline("only graphs for inductor go to the compile process")
    compile_process.check()
    if name == "inductor":
        _ = private.AOTCompiledArtifact  # raises before PyTorch 2.10, where the process would lower the graph in vain
    if _has_varying_numbers(graph, inputs):
        raise LowerInline("a number in it varies")
    fakes = fakes_of(graph, inputs)
    request = request_for(graph, fakes, options, device_of(fakes))
    if request.key in owner.must_be_inline:
        raise LowerInline(owner.must_be_inline[request.key])
    return request


def fakes_of(graph: fx.GraphModule, inputs: list) -> list:
    """The fake inputs of a graph; Dynamo hands some as real tensors, and removes the fakes from the nodes when the backend
    returns."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [node.meta.get("example_value", value) for node, value in zip(placeholders, inputs, strict=True)]


def _numbers_of(fake: Any) -> tuple:
    """Sizes, strides and offset of a tensor, as its strides may vary where its sizes do not; any other input itself."""
    return (*fake.shape, *fake.stride(), fake.storage_offset()) if isinstance(fake, torch.Tensor) else (fake,)


def device_of(fakes: list) -> torch.device:
    devices = [fake.device for fake in fakes if isinstance(fake, torch.Tensor)]
    # A number may come as a tensor on the CPU.
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def lowered_inline(owner: Any, graph: fx.GraphModule, inputs: list, lower: Callable) -> Callable:
    """Lower the graph in the call that traced it."""
    call, began = monitor.calls[-1].call, time.perf_counter()
    try:
        with call.holding(_inline_lock), tracing_scope.applied(gc=True), lowering_settings.scope():
            code = lower(graph, inputs)
    finally:
        call.lowered += time.perf_counter() - began
    owner.count_lowered(0.0, 0)  # in reports these seconds are part of the trace's

    def run(*args: Any) -> Any:
        monitor.calls[-1].release()
        return code(*args)

    return run


def _lower_with_inductor(request: Request, block: str, patient: bool) -> tuple[Callable, Code]:
    import_ahead()
    code = obtain(request, block, patient)
    wait_for_imports()
    try:
        return _loaded(request, code, block), code
    except Exception as error:
        if not code.was_kept or not _is_of_entry(error):
            raise
        logger.warning("code of %s that was kept cannot be loaded (%s): it is compiled anew", block, in_one_line(error))
        code = obtain(request, block, patient, code.name)
        return _loaded(request, code, block), code


def _loaded(request: Request, code: Code, block: str) -> Callable:
    """Load code; returns its function. Errors may be retried: PyTorch does not always tell that a disk or card is full."""
    try:
        with gpu_locks[request.device]:
            return load(code)
    except Exception as error:
        if never_swallowed(error) or isinstance(error, private.MissingName | DescribedError):
            raise
        failure = describe_failure(block, error)
        raise DescribedError(failure.reason, failure.cure, may_pass=True) from error


def _is_of_entry(error: Exception) -> bool:
    """Whether the entry is at fault, so that a new one may load: not if the disk is full, a file cannot be opened or memory is
    short, as far as PyTorch tells. OSError without errno: a library cannot be loaded; ENOENT: the entry lacks a file."""
    if isinstance(error, private.MissingName) or never_swallowed(error):
        return False
    return not any(isinstance(e, OSError) and e.errno not in (None, errno.ENOENT) for e in chain(error))


# Backend -> function that gets the code of a request on the worker thread, and returns (the function to call, its `Code`).
# Graphs of other backends are lowered in the call.
LOWERERS: dict[str, Callable[[Request, str, bool], tuple[Callable, Code]]] = {"inductor": _lower_with_inductor}


class TracedGraph:
    """One FX graph of a block; called with its inputs.

    Args:
        request: what determines the code.
        lower: makes the code of the request, see `LOWERERS`.
        backend: compiles the same graph for other sizes.
    """

    def __init__(
        self,
        owner: Any,
        graph: fx.GraphModule,
        example_inputs: list,
        request: Request,
        lower: Callable,
        backend: Callable,
    ):
        self._owner = weakref.ref(owner)  # alive while the graph is called
        self._version = owner.version
        self._request, self._lower, self._backend = request, lower, backend
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        fakes = fakes_of(graph, example_inputs)
        self._sizes_at = [i for i, fake in enumerate(fakes) if is_symbol(fake)]
        self._varying_at = [i for i, fake in enumerate(fakes) if any(map(is_symbol, _numbers_of(fake)))]
        self._changeable = [i for i, node in enumerate(placeholders) if not is_weight(node)]
        self._writes = any(map(written_by, graph.graph.nodes))
        self._device = device_of(fakes)
        # A copy, without fake tensors.
        self._traced = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        for node in self._traced.graph.nodes:
            node.meta = {}
        self._run_traced = self._traced.forward
        self._code: Callable | None = None
        self._holds: Callable[[tuple], bool] | None = None
        self._alone: tuple[types.FunctionType, Callable] | None = None  # the graph as a function, and `torch.compile` of it
        self._job: Job | None = None
        self._is_refused = False  # the call that traces the graph must lower it
        self._has_run = False
        self._lacked_in = -1  # start of the call of the model in which the code ran out of memory

    def __call__(self, *args: Any) -> Any:
        monitor.calls[-1].release()
        if self._code is None:
            return self._run_unlowered(args)
        if self._holds is not None and not self._holds(args):
            return self._trace_anew(args)
        return self._run_code(args)

    def _run_unlowered(self, args: tuple) -> Any:
        owner: Any = self._owner()
        call, job = monitor.calls[-1].call, self._job
        if owner is None or owner.failure is not None:
            return self._run_traced(*args)
        if self._is_refused:
            return self._trace_anew(args)
        is_free = job is None and not is_capturing(self._device)
        if is_free and (ready := ready_for(self._request)) is not None:
            self._publish(owner, *ready, 0.0)
            return self(*args)
        if job is None or job.over:
            job = self._job = self._make_job(owner, is_first=job is None)
            call.when_over.append(functools.partial(compiler.submit, job))
        if call.synchronous and not is_capturing(self._device):
            monitor.tell(owner.name)
            try:
                compiler.finish(job, call.poll)
            finally:
                monitor.tell(None)
        if self._code is not None or self._is_refused:
            return self(*args)
        if job.over and call.synchronous and job.error is not None:
            monitor.calls[-1].has_run = False
            error, job.error = job.error, None  # its traceback gets the frames of this thread, and their tensors
            try:
                raise error
            finally:
                del error
        owner.raise_if_stopped()
        call.uncompiled = owner.ran_uncompiled = True
        return self._run_traced(*args)

    def _make_job(self, owner: Any, is_first: bool) -> Job:
        cached = 0
        if self._device.type == "cuda":
            # Not on the worker: a call of PyTorch's allocator waits for its lock with the GIL held, and comfy-aimdo, which
            # works inside the allocator, needs the GIL for its log.
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        graph, owned_by, version = weakref.ref(self), self._owner, self._version  # a job keeps neither alive

        def action() -> None:
            traced, live_owner = graph(), owned_by()
            if traced is not None and live_owner is not None:
                traced.lower(live_owner, cached)

        def on_error(error: Exception) -> None:
            if (live_owner := owned_by()) is not None:
                live_owner.lowering_failed(error, version)

        job = Job(owned_by, action, self._device, on_error, is_kept=is_first and is_on_disk(self._request))
        owner.jobs.add(job)
        return job

    def lower(self, owner: Any, cached: int) -> None:
        """Get, load and publish the code, on the worker. `cached`: bytes that PyTorch held unused when the job was made."""
        job = self._job
        assert job is not None
        began = time.perf_counter()
        try:
            run, code = self._lower(self._request, owner.name, not (job.awaited or compiler.awaited))
        except (LowerInline, private.MissingName) as error:
            if not isinstance(error, Unavailable):  # the next `_request_for` checks that again
                owner.must_be_inline[self._request.key] = str(error)
                self._backend = functools.wraps(self._backend)(functools.partial(self._backend, refusal=str(error)))
            self._is_refused = True
            return
        loaded = time.perf_counter()
        with gpu_locks[self._device]:
            if self._request.inputs is not None:
                self._request.inputs.warm_up(run, cached)
            self._publish(owner, code, run, loaded - began)
        seconds = loaded - began, time.perf_counter() - loaded
        logger.debug("%s: code after %.1f s, kernels loaded in %.1f s", owner.name, *seconds)

    def _publish(self, owner: Any, code: Code, run: Callable, seconds: float) -> None:
        """Use the code from now on. `seconds`: how long obtaining and loading it took."""
        self._holds, self._code = _size_check(code.guards, self._sizes_at), run
        owner.count_lowered(seconds, int(code.was_kept), code.name)

    def _run_code(self, args: tuple) -> Any:
        """Run the code. If that fails (a kernel may, on this GPU or at this size) or runs out of memory, run the operators
        instead; if the code writes to its inputs and there are no copies of them, the call fails."""
        is_first, call = not self._has_run, monitor.calls[-1].call
        if (is_first and is_capturing(self._device)) or self._lacked_in == call.began:
            return self._run_traced(*args)
        code, changed = self._code, None
        assert code is not None
        if is_first and self._writes:
            changed = Changed((tuple(args[i] for i in self._changeable), {}))
            changed.keep()
        try:
            result = code(*args)
        except Exception as error:
            lacks_memory = is_out_of_memory(error)
            if is_capturing(self._device) or (never_swallowed(error) and not lacks_memory):
                raise
            self._has_run = False  # the next time with copies
            owner: Any = self._owner()
            if not lacks_memory:
                self._code = None
                owner.lowering_failed(error, self._version)
            if self._writes and (changed is None or not changed.can_be_put_back):
                raise
            if not lacks_memory:
                owner.raise_if_stopped()
        else:
            self._has_run = True
            return result
        # Not in the `except`: there the error holds what the code has allocated.
        if changed is not None:
            changed.put_back()
            del changed  # there may be no room beside the copies
        if lacks_memory:
            self._lacked_in, call.uncompiled, owner.ran_uncompiled = call.began, True, True
            owner.compiles += 1  # so that no CUDA graph is captured in the next call: it would hold this graph's operators
            logger.info("%s: too little memory for its code in this step, runs uncompiled", owner.name)
        return self._run_traced(*args)

    def _trace_anew(self, args: tuple) -> Any:
        """Trace the graph alone and run the result: for sizes that its code does not fit, or because the call that traces it
        must lower it."""
        owner: Any = self._owner()
        session = monitor.calls[-1]
        call = session.call
        may_trace = call.may_trace and not is_capturing(self._device)
        if self._alone is None and may_trace:
            if self._is_refused:
                owner.reset_trace_counts()
            traced = self._traced
            function = with_own_code(lambda *args: traced(*args))
            weakref.finalize(self, dead_code.append, function.__code__).atexit = False
            self._alone = function, torch.compile(function, backend=self._backend)
        if self._alone is None:
            result, has_run = self._run_traced(*args), False
        else:
            function, compiled = self._alone
            outer, session.sources = session.sources, [f"L['args'][{at}]" for at in self._varying_at]
            session.has_run = False
            session.hold()
            try:
                result = (compiled if may_trace else private.run(function))(*args)
                has_run = may_trace or session.has_run
            finally:
                session.sources, session.has_run = outer, True
        if not has_run:
            call.uncompiled = owner.ran_uncompiled = True
            call.put_off |= not (call.may_trace or owner.limit_reached)
        return result


def with_own_code(function: Any) -> types.FunctionType:
    """A copy with a code object of its own: PyTorch keeps compiled code, and counts variants, by code object."""
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied


def _size_check(guards: str | None, at: list[int]) -> Callable[[tuple], bool] | None:
    """A check of the sizes among the inputs; None: the code fits all sizes."""
    if not guards:
        return None

    @functools.lru_cache(1024)
    def evaluated(values: tuple) -> bool:
        return holds(guards, values)

    return lambda args: evaluated(tuple(args[i] for i in at))
