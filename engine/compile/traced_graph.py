"""Run a graph as soon as Dynamo has traced it, and swap compiled code in when a worker thread has lowered it.

torch.compile lowers a graph (AOTAutograd, inductor, Triton or C++) inside the call that traced it, so the first image waits for
minutes. Tracing later, on a copy and on another thread, misses what holds only during the call: contexts, hooks, functions that
ComfyUI or another node swaps. So:

1. Dynamo traces the block in the call, where its guards hold, and hands the FX graph to `TracedGraph` as to any backend.
2. The first run makes a job. Unless the call is synchronous it goes on at once: the FX graph runs operator by operator, as
   exact and as slow as uncompiled code. The job is queued when the model's call is over.
3. The worker lowers the graph on fake tensors, so it holds no weight.
4. It loads and tunes the kernels on zeros, while it holds one of `gpu_locks`: a CUDA graph capture bears neither.
5. The code is published, and runs from then on wherever the guards hold that lowering added to those of Dynamo. A call with
   other sizes has Dynamo trace the graph once more, as it would have traced the block.

A graph that cannot be lowered goes on as in 2, and `BlockCode` decides what becomes of its group. Graphs with numbers that vary
are lowered in the call (`lowered_inline`): PyTorch restarts the trace for some of them.

The `owner` of a graph is its `BlockCode`, whose module imports this one: hence `Any`.
"""

import collections
import copy
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from ..background.gate import gate
from ..background.model_call import ModelCall
from ..background.thread import Job, Postponed, compiler
from ..cache.shared import CompiledElsewhere, sharing
from ..cache.startup import wait_until_prepared
from ..failures.describe import is_out_of_memory, never_swallowed
from ..inductor.backend import inductor, needs_gradients
from ..log import logger
from ..out_of_place import may_write, out_of_place
from ..tensor_spec import TensorSpec, hint
from ..torch_compat import private
from .call_shapes import Changed
from .session import lowering_scope, monitor, tracing_scope

# By device: a CUDA graph capture on it holds the lock, and the worker while it loads kernels and publishes code for it.
gpu_locks: collections.defaultdict[torch.device, threading.Lock] = collections.defaultdict(threading.Lock)
# Inductor keeps its options for the process up to PyTorch 2.11, so one graph is lowered at a time.
_lowering_lock = threading.Lock()
# Of memory that stays free beside the tensors on which kernels are tuned.
MARGIN = 512 * 2**20
# Peak memory of a block as a multiple of its inputs without weights: attention, and an MLP of four times the width.
INTERMEDIATES = 8


class _Current(threading.local):
    """The model's call in progress on this thread."""

    call: ModelCall | None = None


current = _Current()
# Code objects of freed graphs, whose compiled code PyTorch would keep; see `compiled_code.free_unused`.
dead_code: list[types.CodeType] = []


def backend_for(owner: Any, name: str, options: dict) -> Callable:
    """A backend of torch.compile for one owner; it lowers with the registered backend `name`, or with `inductor/backend.py`."""
    reference = weakref.ref(owner)  # PyTorch's table of compiled code would keep the owner alive

    def backend(graph: fx.GraphModule, example_inputs: list) -> Callable:
        prepare(graph, example_inputs)
        if monitor.calls:
            monitor.calls[-1].graphs += 1
        live_owner = reference()
        if live_owner is not None and any(map(may_write, graph.graph.nodes)):
            live_owner.writes_in_place = True
        lower = functools.partial(inductor, options=options) if name == "inductor" else private.lookup_backend(name)
        if _has_varying_numbers(graph, example_inputs):
            return lowered_inline(reference, graph, example_inputs, lower)
        return TracedGraph(reference, graph, example_inputs, lower, backend)

    backend.__name__ = name
    return backend


def prepare(graph: fx.GraphModule, example_inputs: list) -> None:
    """See `out_of_place.py`."""
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


def lowered_inline(owner: weakref.ref, graph: fx.GraphModule, inputs: list, lower: Callable) -> Callable:
    """Lower the graph in the call that traced it."""
    live_owner = owner()
    if live_owner is None:
        return graph.forward
    alone = (current.call or ModelCall()).holding(_lowering_lock)
    with gate.opened(), alone, tracing_scope.applied(gc=True), lowering_scope(live_owner.folder) as spent:
        code = lower(graph, inputs)
    live_owner.count_lowered(0.0, spent.from_disk)  # its seconds are the trace's

    def run(*args: Any) -> Any:
        if monitor.calls:
            monitor.calls[-1].release()
        return code(*args)

    return run


class TracedGraph:
    """One FX graph of a block; called with its inputs.

    Args:
        lower: makes the code from a graph and fake inputs.
        backend: compiles the same graph for other sizes.
    """

    def __init__(self, owner: weakref.ref, graph: fx.GraphModule, example_inputs: list, lower: Callable, backend: Callable):
        self._owner = owner
        self._backend = backend
        live_owner = owner()
        self.version = live_owner.version if live_owner is not None else 0
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # Dynamo removes the fake tensors from the nodes when the backend returns.
        fakes = [node.meta.get("example_value", value) for node, value in zip(placeholders, example_inputs, strict=True)]
        self._sizes_at = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
        self._changeable = [i for i, node in enumerate(placeholders) if not _is_weight(node)]
        devices = [fake.device for fake in fakes if isinstance(fake, torch.Tensor)]
        # A number may come as a tensor on the CPU.
        self._device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        # A copy, since lowering rewrites its graph.
        self._traced = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        for node in self._traced.graph.nodes:
            node.meta = {}  # fake tensors
        self._run_traced = self._traced.forward
        self._lowering: _Lowering | None = _Lowering(graph, fakes, lower, self._device, set(self._changeable))
        self._code: Callable | None = None
        self._holds: Callable[[tuple], bool] | None = None
        self._other_sizes: Callable | None = None
        self._job: Job | None = None
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        if monitor.calls:
            monitor.calls[-1].release()
        if self._code is None:
            return self._run_unlowered(args)
        if self._holds is not None and not self._holds(args):
            return self._run_other_sizes(args)
        if not self._has_run:
            return self._run_first(args)
        return self._code(*args)

    def _run_unlowered(self, args: tuple) -> Any:
        owner, call, job = self._owner(), current.call, self._job
        if owner is None or call is None or self._lowering is None or owner.failure is not None:
            return self._run_traced(*args)
        must_wait = call.synchronous and not is_capturing(self._device)
        if job is None or job.over:
            job = self._job = self._make_job(owner)
            if not must_wait:
                call.when_over.append(functools.partial(compiler.submit, job))
        if must_wait:
            if monitor.listener is not None:
                monitor.listener(owner.name)
            try:
                # Kernels are tuned on random numbers, which this thread must not miss.
                with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                    compiler.finish(job, call.poll)
            finally:
                if monitor.listener is not None:
                    monitor.listener(None)
            if self._code is not None:
                return self(*args)
        if job.over and call.synchronous and job.error is not None:
            raise job.error
        owner.raise_if_stopped()
        call.uncompiled = True
        return self._run_traced(*args)

    def _make_job(self, owner: Any) -> Job:
        """Called by the first run: before that Dynamo makes the guards of the graph, which read what lowering changes."""
        cached = 0
        if self._device.type == "cuda":
            # Not on the worker: a call of PyTorch's allocator waits for its lock with the GIL held, and comfy-aimdo, which
            # works inside the allocator, needs the GIL for its log.
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        graph, owned_by = weakref.ref(self), self._owner  # a job keeps neither alive

        def action() -> None:
            traced, live_owner = graph(), owned_by()
            if traced is not None and live_owner is not None:
                traced.lower(live_owner, cached)

        def on_error(error: Exception) -> bool:
            traced, live_owner = graph(), owned_by()
            if traced is None or live_owner is None:
                return False
            retry = live_owner.lowering_failed(error, traced.version)
            if not retry and not (live_owner.failure is not None and live_owner.failure.may_pass):
                traced._lowering = None  # for good
            return retry

        job = Job(owned_by, action, self._device, on_error)
        owner.jobs.add(job)
        return job

    def lower(self, owner: Any, cached: int) -> None:
        """On the worker; `cached` bytes on the device were reserved and unused when the job was queued."""
        lowering = self._lowering
        if lowering is None or self._code is not None:
            return
        wait_until_prepared()
        job = self._job
        assert job is not None
        shared = sharing(owner.folder[0], may_wait=not (job.awaited or compiler.awaited))
        try:
            with _lowering_lock, lowering_scope(owner.folder) as spent, shared:
                code, holds = lowering.run(self._sizes_at)
                lowered = time.perf_counter()
                with gpu_locks[self._device]:
                    lowering.warm_up(code, cached)
                    self._holds, self._code = holds, code
                loading = time.perf_counter() - lowered
        except CompiledElsewhere as error:
            job.attempts -= 1  # however long the other worker takes
            raise Postponed("another worker compiles this graph") from error
        owner.count_lowered(spent.seconds, spent.from_disk)
        logger.debug("%s: lowered in %.1f s, %.1f s of them loading kernels", owner.name, spent.seconds, loading)

    def _run_first(self, args: tuple) -> Any:
        """Run the code for the first time: a kernel may fail on this GPU."""
        if is_capturing(self._device):
            return self._run_traced(*args)
        changed = Changed((tuple(args[i] for i in self._changeable), {}))
        changed.keep()
        code = self._code
        assert code is not None
        lacks_memory = False
        try:
            result = code(*args)
        except Exception as error:
            owner = self._owner()
            lacks_memory = is_out_of_memory(error) and changed.has_copies
            if not lacks_memory:
                if never_swallowed(error) or owner is None or not changed.put_back():
                    raise
                self._code = None
                if not owner.lowering_failed(error, self.version):
                    self._lowering = None
                owner.raise_if_stopped()
                return self._run_traced(*args)
        if lacks_memory:  # the copies may fill it; here the error, which holds what the code has allocated, is gone
            changed.put_back()
            del changed
            result = code(*args)
        self._has_run, self._lowering = True, None
        return result

    def _run_other_sizes(self, args: tuple) -> Any:
        if self._other_sizes is None:
            if is_capturing(self._device) or (current.call is not None and not current.call.may_trace):
                return self._run_traced(*args)
            traced = self._traced
            function = with_own_code(lambda *args: traced(*args))
            weakref.finalize(self, dead_code.append, function.__code__).atexit = False
            self._other_sizes = torch.compile(function, backend=self._backend)
        return self._other_sizes(*args)


def with_own_code(function: Any) -> types.FunctionType:
    """A copy with a code object of its own: PyTorch keeps compiled code, and counts variants, by code object."""
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied


class _Lowering:
    """What lowering a graph needs of the call that traced it: fake tensors and modes. Code may write to `changeable` inputs."""

    def __init__(self, graph: fx.GraphModule, fakes: list, lower: Callable, device: torch.device, changeable: set[int]):
        self._graph, self._fakes, self._lower, self._device = graph, fakes, lower, device
        self._changeable = changeable
        self._context = private.TracingContext.get()
        self._draws_random_numbers = any(map(_is_random, graph.graph.nodes))
        self._guards_before: int | None = None
        self._grad = torch.is_grad_enabled()
        self._default_dtype = torch.get_default_dtype()
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def run(self, sizes_at: list[int]) -> tuple[Callable, Callable[[tuple], bool] | None]:
        """The code, and a check of the sizes among its inputs; None: the code fits all sizes."""
        shapes = self._context.fake_mode.shape_env
        if shapes is not None and self._guards_before is None:
            # Before the first attempt: guards that it adds hold in the next attempt without being added again.
            self._guards_before = len(shapes.guards)
        self._check_default_dtype()  # where it is always another one, to lower in vain takes a core for minutes
        with ExitStack() as scopes:
            scopes.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                scopes.enter_context(torch.autocast(*self._autocast))
            scopes.enter_context(private.tracing(self._context))
            self._use_one_fake_mode()
            code = self._lower(self._graph, self._fakes)
        self._check_default_dtype()
        added = shapes.guards[self._guards_before :] if shapes is not None else []
        return code, _size_check(shapes, added, [self._fakes[i] for i in sizes_at], sizes_at)

    def _check_default_dtype(self) -> None:
        if torch.get_default_dtype() is not self._default_dtype:
            # It is the process's: a loader of another node has changed it for a while, and the code may have its types.
            raise Postponed("the default dtype of PyTorch is another one than when the block was traced")

    def _use_one_fake_mode(self) -> None:
        """Before 2.10 PyTorch refuses inputs of another mode than the context's, which Dynamo has made anew for the backend."""
        try:
            private.detect_fake_mode(self._fakes)
        except AssertionError:
            tensors = (fake for fake in self._fakes if isinstance(fake, torch.Tensor))
            self._context.fake_mode = next(fake.fake_mode for fake in tensors)

    def warm_up(self, code: Callable, cached: int) -> None:
        """Load and tune kernels, a good part of the first run on a GPU, unless the graph draws random numbers: the sampler's
        would change."""
        if self._device.type != "cuda" or self._draws_random_numbers:
            return
        try:
            with torch.set_grad_enabled(False):
                inputs = self._zeros(cached)
                if inputs is None:
                    return
                code(*inputs)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # the first real run does it
            logger.debug("kernels were not loaded in advance: %s", error)

    def _zeros(self, cached: int) -> list | None:
        """Inputs like those of the call; weights, which are only read, share memory. None where there is no room."""
        tensors = {i: fake for i, fake in enumerate(self._fakes) if isinstance(fake, torch.Tensor)}
        if not all(map(_is_plain, tensors.values())):
            return None
        specs = {i: TensorSpec.of(fake) for i, fake in tensors.items()}
        shared = max((spec.nbytes for i, spec in specs.items() if i not in self._changeable), default=0)
        needed = shared + INTERMEDIATES * sum(spec.nbytes for i, spec in specs.items() if i in self._changeable)
        free, _total = torch.cuda.mem_get_info(self._device)
        if free + cached < needed + MARGIN:
            return None
        storage = torch.zeros(shared, dtype=torch.uint8, device=self._device).untyped_storage()
        inputs = [hint(fake) for fake in self._fakes]
        for i, spec in specs.items():
            inputs[i] = spec.zeros() if i in self._changeable else spec.on(storage)
        return inputs


def _size_check(shapes: Any, guards: list, sizes: list, at: list[int]) -> Callable[[tuple], bool] | None:
    """As PyTorch's cache of FX graphs checks the guards of a cached graph (torch/_inductor/codecache.py)."""
    expression = shapes.produce_guards_expression(placeholders=sizes, guards=guards) if guards else None
    if not expression:
        return None

    @functools.cache
    def evaluated(values: tuple) -> bool:
        return bool(shapes.evaluate_guards_expression(expression, values))

    return lambda args: evaluated(tuple(args[i] for i in at))


# Functions and methods that draw random numbers.
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_"),
}


def _is_random(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _RANDOM


def _is_weight(node: fx.Node) -> bool:
    """Whether a graph's input is a parameter or buffer of the block, as Dynamo names them."""
    return "_parameters_" in str(node.target) or "_buffers_" in str(node.target)


def _is_plain(fake: torch.Tensor) -> bool:
    """Whether a tensor is a strided view of memory."""
    wraps = private.is_traceable_wrapper_subclass(fake)
    return fake.layout is torch.strided and not fake.is_nested and not wraps


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
