"""CUDA graphs over a whole diffusion model, one per shape.

PyTorch's own (`triton.cudagraphs`) make a tree per compiled region, and regions that follow each other overwrite their outputs
(pytorch#152887). Here the model's forward, compiled blocks and all, is captured once per shape and replayed: no Python, no
launches one by one. Small models are bound by those; large ones gain little.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from ..compile.traced_graph import gpu_locks
from ..failures.describe import is_out_of_memory, never_swallowed
from ..per_model import PerModel
from ..torch_compat import private
from ..torch_settings import SharedScope
from .model_state import ModelState

# Inductor's launchers, and Triton's own: for kernels of ours and of others (SageAttention).
_LAUNCHERS = {
    "inductor": private.switch("run_of_autotuner", late=True),
    "triton": private.switch("call_of_launcher", late=True),
}
_scope = SharedScope(_LAUNCHERS)


@contextmanager
def as_numbers() -> Iterator[None]:
    """While it lasts, a capturing thread hands Triton's kernels addresses in place of tensors."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        yield
        return
    with _scope.wrapping(**dict.fromkeys(_LAUNCHERS, _with_addresses)):
        yield


def _with_addresses(launcher: Callable) -> Callable:
    def launches(self: object, *args: object, **kwargs: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return launcher(self, *args, **kwargs)

    return launches


T = TypeVar("T")
logger = logging.getLogger("torch-compile-kit")
# Each graph holds its inputs and its output; working memory is shared.
MAX_GRAPHS = 8
# So many kinds of calls that have no graph are remembered.
MAX_OTHERS = 256


@dataclass
class Captured:
    """One captured call.

    Args:
        device: where it was captured, and is replayed.
        inputs: the tensors to fill before a replay, in the order of the flattened arguments.
        output: what the call returns, overwritten by each replay.
    """

    device: torch.device
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: object
    has_run: bool = False

    def replay(self, tensors: list[torch.Tensor]) -> object:
        with torch.cuda.device(self.device):  # another one may be the current one
            for static, given in zip(self.inputs, tensors, strict=True):
                static.copy_(given)
            try:
                self.graph.replay()
            except RuntimeError:
                if not self.has_run:
                    _never_allocated.append((self.graph, self.output))
                raise
            self.has_run = True
            return private.pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self.output)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs on `device` are captured on, one for all, as their shared memory asks for.

    PyTorch's own default (`torch.cuda.graph`) belongs to whichever device came first: on others it records nothing.
    """
    return torch.cuda.Stream(device)


def give_back(device: torch.device | None) -> None:
    """Give the system the memory of graphs that are gone.

    Under cudaMallocAsync the driver keeps it for graphs to come (CUDA Driver API, `cuDeviceGraphMemTrim`): of one with 4 GiB of
    intermediates nothing was free again, on an H100, after the graph was, whatever PyTorch's cache was told.
    """
    if device is None or device.type != "cuda" or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    driver = _driver()
    if driver is None:
        return
    if not _capturing:  # a capture bears no synchronization
        torch.cuda.synchronize(device)  # it frees only what is not in use
    handle = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    if driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
        driver.cuDeviceGraphMemTrim(handle)


# What graphs that have never run would have put their results into. Under cudaMallocAsync only a run allocates that, and giving
# back what was never allocated ends the process (CUDAMallocAsyncAllocator.cpp, `free_impl`): the addresses stay.
_never_allocated: list[object] = []
# Devices on which a capture goes on.
_capturing: list[torch.device] = []


@contextmanager
def _capture_on(device: torch.device) -> Iterator[None]:
    _capturing.append(device)
    try:
        yield
    finally:
        _capturing.remove(device)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: object, stream: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.graph`; what would wait for the GPU raises before CUDA is asked, which would make the capture invalid.

    An invalid one cannot be ended: PyTorch believes that it goes on for ever, and leaves the thread on its stream. That raising
    is the process's setting, so it is left as it is where another GPU may be at work.
    """
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed")
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with as_numbers(), capture:
            if torch.cuda.device_count() == 1:
                with warnings.catch_warnings():  # it is a prototype, says PyTorch
                    warnings.simplefilter("ignore")
                    torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
    except BaseException:
        if torch.cuda.current_stream() == stream:
            capture.stream_ctx.__exit__(None, None, None)
        raise


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        driver.cuDeviceGraphMemTrim  # noqa: B018  from CUDA 11.4 on
    except (OSError, AttributeError):
        return None
    return driver


# What `call` keeps the weights in place with, if they can stay anywhere at all.
Keep = Callable[[], AbstractContextManager[bool]]


@dataclass
class ModelGraphs:
    """The graphs of one model.

    Args:
        graphs: the one that was replayed last is the last.
        seen: calls that have run plainly once, and so have compiled what they need.
        failures: why a call is not captured.
        model: what the graphs know of it.
        code: see `call`.
        plain_calls: since the last replay.
    """

    graphs: dict[Hashable, Captured] = field(default_factory=dict)
    seen: dict[Hashable, None] = field(default_factory=dict)
    failures: dict[Hashable, str] = field(default_factory=dict)
    model: ModelState = field(default_factory=ModelState)
    code: Hashable = None
    plain_calls: int = 0
    captures: int = 0
    replays: int = 0
    _pool: object = None
    _never_replayed: set[Hashable] = field(default_factory=set)

    def drop(self) -> None:
        """Free the graphs and their memory: the weights have moved, or are about to."""
        self._free_graphs()
        self.seen.clear()
        self.failures.clear()
        self.model.forget()
        self._pool = None

    def new_run(self) -> None:
        """A sampling run begins: weights may have moved since the last."""
        self.model.new_run()

    def check_model(self, model: nn.Module, device: torch.device, places: Callable[[nn.Module], object] | None = None) -> None:
        """Once a sampling run, see `ModelState.look_at`: graphs of a model that has changed are dropped."""
        self.model.look_at(model, device, places, self._changed)

    def _changed(self) -> None:
        if self.graphs:
            logger.info("the model's weights or layers have changed: CUDA graphs are captured anew")
        self.drop()

    def call(
        self,
        key: Hashable,
        forward: Callable,
        args: tuple,
        kwargs: dict,
        fixed: dict,
        keep: Keep = lambda: nullcontext(True),
        code: Callable[[], Hashable] = lambda: None,
        ran_uncompiled: Callable[[], bool] = lambda: False,
    ) -> object:
        """Replay the call if it has been captured, capture it when it comes the second time, else run it.

        Args:
            key: all that the call depends on but what is in the tensors: `value_key` of the arguments and more.
            args, kwargs: tensors and what they are nested in; every tensor becomes an input of the graph.
            fixed: keyword arguments that are the same for equal keys.
            keep: entered for a capture or a replay; yields whether all weights are where the graphs know them.
            code: tells something that changes when more of the model has been compiled, so that it is captured anew.
            ran_uncompiled: tells whether a block ran uncompiled in the call that has just ended.
        """
        self._renew(code())
        leaves, spec = private.pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = self.model.device
        if any(t.device != device for t in tensors):  # a number on the CPU becomes a constant of the graph
            _remember(self.failures, "device", "an input is on another device")
            return forward(*args, **kwargs, **fixed)
        if key in self.seen and key not in self.failures:
            with keep() as present:
                captured = self.graphs.pop(key, None) if present else None
                if captured is not None:
                    self.graphs[key] = captured
                    self._never_replayed.discard(key)
                    self.replays += 1
                elif present and gpu_locks[device].acquire(blocking=False):  # else code is tried on the GPU: the next call then
                    try:
                        self._make_room()
                        captured = self._capture(key, forward, leaves, spec, tensors, fixed)
                        if captured is not None:
                            self._never_replayed.add(key)
                    finally:
                        gpu_locks[device].release()
                if captured is not None:
                    try:
                        return captured.replay(tensors)
                    except RuntimeError as error:
                        if not is_out_of_memory(error):
                            raise
                        reason = _reason(error)
                    # What was given is as it was: a graph works on copies.
                    captured = None
                    self._ran_out_of_memory(key, reason)
        before = self.code
        result = forward(*args, **kwargs, **fixed)
        self._renew(code())
        if self.code == before or not ran_uncompiled():  # else there is code now that has never run: a capture bears none
            _remember(self.seen, key, None)
        return result

    def _renew(self, code: Hashable) -> None:
        if code != self.code:
            self.code = code
            self._free_graphs()
            self.seen.clear()

    def _free_graphs(self) -> None:
        if self.graphs:
            self.graphs.clear()
            self._never_replayed.clear()
            give_back(self.model.device)

    def _make_room(self) -> None:
        """For one more graph: the one that was replayed least recently goes, for good if it never was."""
        while len(self.graphs) >= MAX_GRAPHS:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest]
            if oldest in self._never_replayed:
                self._never_replayed.discard(oldest)
                _remember(self.failures, oldest, f"more than {MAX_GRAPHS} kinds of calls take turns")

    def _ran_out_of_memory(self, key: Hashable, reason: str) -> None:
        """The memory of all graphs is given up: a plain call needs none of its own beside."""
        self._free_graphs()
        self.seen.clear()
        self._pool = None
        self._fails(key, reason)

    def _fails(self, key: Hashable, reason: str) -> None:
        _remember(self.failures, key, reason)
        logger.info("CUDA graph not captured, running without: %s", reason)

    def _capture(
        self, key: Hashable, forward: Callable, leaves: list, spec: object, tensors: list, fixed: dict
    ) -> Captured | None:
        """The call as a graph, which has not run yet; None if it cannot be one."""
        device = self.model.device
        stream = capture_stream(device)
        try:
            static = [t.clone(memory_format=torch.preserve_format) for t in tensors]
            replacements = iter(static)
            own = [next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = private.pytree.tree_unflatten(own, spec)
            with torch.cuda.device(device):
                if not self.graphs:  # PyTorch gives up a pool with its last graph (CUDACachingAllocator.cpp, `releasePool`)
                    self._pool = torch.cuda.graph_pool_handle()
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize(device)
                output, failed = None, None
                try:
                    with _capture_on(device), _recording(graph, self._pool, stream):
                        try:
                            output = forward(*args, **kwargs, **fixed)
                        except BaseException as error:  # the host's cancel is no Exception
                            failed = error
                    if failed is not None:
                        graph.replay()  # allocates what the error keeps alive
                        torch.cuda.synchronize(device)
                except RuntimeError:
                    _never_allocated.append((graph, output, failed))
                    raise
                finally:
                    if failed is not None:
                        raise failed
        except Exception as error:
            if never_swallowed(error) and not is_out_of_memory(error):
                raise
            torch.cuda.synchronize(device)
            if is_out_of_memory(error):
                self._ran_out_of_memory(key, _reason(error))
            else:
                self._fails(key, _reason(error))
            return None
        self.captures += 1
        logger.info("CUDA graph %d captured", self.captures)
        # In-place work on the inputs while capturing did not run; the replay starts from the caller's values.
        self.graphs[key] = Captured(device, graph, static, output)
        return self.graphs[key]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _remember(table: dict[Hashable, T], key: Hashable, value: T) -> None:
    """The last of the table; the first of many are forgotten."""
    table.pop(key, None)
    table[key] = value
    while len(table) > MAX_OTHERS:
        del table[next(iter(table))]


def _made(model: nn.Module) -> ModelGraphs:
    graphs = ModelGraphs()
    weakref.finalize(model, graphs.drop).atexit = False
    return graphs


# The graphs that belong to a model; with it their memory is given back.
graphs_of = PerModel(_made)
