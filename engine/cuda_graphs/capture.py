"""Capture and replay CUDA graphs of a whole diffusion model, one per shape.

PyTorch's own graphs (`triton.cudagraphs`) are a tree per compiled region, and consecutive regions overwrite each other's
outputs (pytorch#152887). Here the model's forward, compiled blocks included, is one graph: a replay runs no Python and
launches no kernels one by one. Python and launches limit the speed of small models; large models gain little.

1. Once a sampling run, and after changes, `ModelState.check_unchanged` records the weights' addresses and what the layers hold.
   If any of that has changed, the graphs are dropped. Only calls in which all code is the host's get graphs (ownership.py).
2. The first call for a key is a warm-up: the forward runs, and Dynamo traces. If a block ran uncompiled and its code became
   ready during the call, the next call is the warm-up: that code has never run, and a capture can neither trace nor load
   kernels. The shapes of the result are recorded (`seen`).
3. The second call captures, on copies of its tensors, under the lock of its device (`gpu_locks`); the worker loads kernels
   under the same lock. The graph is then replayed, which gives the result of this call.
4. Later calls copy their tensors into the graph's inputs, replay, and return a copy of the output. After a capture, and in some
   runs, `_checked` compares a replay with a plain call, once no code is being compiled. If the two differ, the model gets no
   graphs any more.
5. New compiled code (`code`) drops all graphs. A model has at most MAX_GRAPHS: the least recently replayed graph is evicted,
   and if only the call that captured that graph replayed it, its key gets no graph again. A call that cannot be captured runs
   without a graph; `failures` holds the reason.
6. Running out of memory drops all graphs and their pool; the call that ran out gets no graph until the weights move. A call
   whose capture failed for another reason, or that keeps memory it has allocated, is not captured again while the layers run
   the same functions. New compiled code clears both kinds of failures.

Memory. What a capture allocates must be freed within the capture. Under cudaMallocAsync, freeing such a tensor later is at
best a warning ("Attempting uncaptured free of a captured allocation"), and ends the process if the graph has never run, or
its memory was given back (CUDAMallocAsyncAllocator.cpp, `free_impl`). So inputs, outputs and cuBLAS's workspaces are allocated
before the capture; garbage is collected within the capture only if memory of the capture is still allocated; and after an error
the locals of the frames in its traceback are cleared. Memory that is allocated even then is held by other code, which may free
it at any time: such memory is never freed, nor is its graph (`_kept_for_good`).

Launches of Triton kernels. Triton's launchers ask the driver about each pointer that is passed as a tensor
(triton/backends/nvidia/driver.py, `getPointer`). The driver does not know memory that a running capture has allocated with
cudaMallocAsync, ComfyUI's default allocator: "CUDA driver error: invalid argument", or "Pointer argument cannot be accessed
from Triton". Pointers that are passed as numbers are not checked, so `as_numbers` passes addresses in place of tensors.
"""

import ctypes
import functools
import gc
import itertools
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..compile.session import tracing_scope
from ..devices import gpu_locks, others_in_use, seconds_when_done
from ..failures.describe import in_one_line, is_out_of_memory, never_swallowed
from ..log import logger
from ..per_model import PerModel
from ..torch_compat import private
from ..torch_settings import SharedScope
from .model_state import ModelState

# The launcher of inductor's kernels, and Triton's launcher, for kernels of this pack and of others (SageAttention).
_LAUNCHERS = {
    "inductor": private.switch("run_of_autotuner", late=True),
    "triton": private.switch("call_of_launcher", late=True),
}
_scope = SharedScope(_LAUNCHERS)


@contextmanager
def as_numbers() -> Iterator[None]:
    """Within this context, a capturing thread passes addresses to Triton's kernels in place of tensors."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        yield
        return
    with _scope.wrapping(**dict.fromkeys(_LAUNCHERS, _with_addresses)):
        yield


def _with_addresses(launcher: Callable) -> Callable:
    def launch(self: object, *args: object, **kwargs: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return launcher(self, *args, **kwargs)

    return launch


# The most graphs of a model. Each graph holds its inputs and its output; the graphs share their working memory.
MAX_GRAPHS = 8
# The most keys that `_remember` keeps in each table (calls seen, failures, costs).
MAX_OTHERS = 256
NO_ROOM = "too little memory is free"  # a failure that the next run clears


# PyTorch allows one capture at a time in a process, on all GPUs together (CUDAMallocAsyncAllocator.cpp, `beginAllocateToPool`).
_capture_lock = threading.Lock()


@contextmanager
def _all_held(*locks: threading.Lock) -> Iterator[bool]:
    """Hold the locks that are free, without waiting; yields whether all of them were."""
    held = [lock for lock in locks if lock.acquire(blocking=False)]
    try:
        yield len(held) == len(locks)
    finally:
        for lock in held:
            lock.release()


@dataclass
class Captured:
    """One captured call. `inputs`: the tensors to fill before a replay, in the order of the flattened arguments. `output`: its
    tensors were allocated before the capture, and each replay overwrites them."""

    device: torch.device
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: object

    def replay(self, tensors: list[torch.Tensor]) -> object:
        with torch.cuda.device(self.device):  # the current device may differ
            for static, tensor in zip(self.inputs, tensors, strict=True):
                static.copy_(tensor)
            self.graph.replay()
            return private.pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self.output)


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs of a device are captured, since they share memory.

    The default stream of `torch.cuda.graph` is on the first device that captured: on other devices that stream records nothing.
    """
    return torch.cuda.Stream(device)


def give_back(device: torch.device | None) -> None:
    """Make the driver release the memory of freed graphs.

    Under cudaMallocAsync the driver keeps that memory for later graphs (CUDA Driver API, `cuDeviceGraphMemTrim`): on an H100,
    all 4 GiB of a freed graph's intermediates, even after PyTorch's cache was emptied.
    """
    if device is None or device.type != "cuda" or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return
    if (driver := _driver()) is None:
        return
    if not _capturing:  # synchronizing would break a capture
        torch.cuda.synchronize(device)  # trimming frees only what is not in use
    handle = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    if driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
        driver.cuDeviceGraphMemTrim(handle)


# Graphs with the memory that their captures did not free. PyTorch keeps a pointer to a graph whose capture cannot end.
_kept_for_good: list[tuple[torch.cuda.CUDAGraph, list[torch.UntypedStorage]]] = []
_capturing: list[torch.cuda.CUDAGraph] = []


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: object, stream: torch.cuda.Stream, alone: bool) -> Iterator[None]:
    """Like `torch.cuda.graph`, but an operation that waits for the GPU raises before CUDA invalidates the capture.

    PyTorch cannot end an invalid capture, and leaves the thread on the capture's stream; under cudaMallocAsync the first tensor
    that is freed then ends the process. `set_sync_debug_mode` applies to the whole process, so it is called only if no other
    GPU is in use (`alone`); else nothing is captured under cudaMallocAsync (`no_graphs` in host/graphs/policy.py). Garbage
    collection is off during the capture, since the garbage may hold memory of an earlier capture.
    """
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="relaxed")
    mode = torch.cuda.get_sync_debug_mode()
    _capturing.append(graph)
    try:
        with tracing_scope.applied(gc=False), as_numbers(), capture:
            if alone:
                with warnings.catch_warnings():  # PyTorch warns that the setting is a prototype
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
    finally:
        _capturing.remove(graph)


def _keep_for_good(graph: torch.cuda.CUDAGraph, left: list[torch.UntypedStorage]) -> None:
    _kept_for_good.append((graph, left))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_for_good[-1]))  # at exit Python empties this list


def allocate_workspaces(stream: torch.cuda.Stream) -> None:
    """Make PyTorch allocate the workspaces of cuBLAS and cuBLASLt, which it does at the first product on a stream, for good
    (ATen/cuda/CublasHandlePool.cpp). Workspaces that a failed capture allocates would be memory that no graph ever allocates:
    later captures get the same addresses for other tensors."""
    with torch.cuda.stream(stream):
        one = torch.ones(16, 16, device=stream.device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)  # with a bias: by cuBLASLt (ATen/native/cuda/Blas.cpp)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        driver.cuDeviceGraphMemTrim  # noqa: B018  from CUDA 11.4 on
    except (OSError, AttributeError):
        return None
    return driver


def _is_allocated(address: int) -> bool:
    """Whether the driver knows the address; memory that the running capture has allocated is unknown to the driver."""
    driver, memory_type = _driver(), ctypes.c_uint()
    query = ctypes.byref(memory_type), 2, ctypes.c_ulonglong(address)  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return driver is not None and driver.cuPointerGetAttribute(*query) == 0


def _may_free(stream: torch.cuda.Stream) -> bool:
    """Whether the running capture is valid: freeing memory in an invalid capture ends the process."""
    driver, status = _driver(), ctypes.c_int()
    if driver is None or driver.cuStreamIsCapturing(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status)):
        return True
    return status.value != 2  # CU_STREAM_CAPTURE_STATUS_INVALIDATED


_TENSORS = frozenset({id(torch.Tensor), id(nn.Parameter)})  # a type need not be hashable


def _allocated_by_capture(device: torch.device) -> list[torch.UntypedStorage]:
    """Memory that the running capture has allocated and not freed, found by inspecting all tensors of the process."""
    storages: list[torch.UntypedStorage] = []
    kept = {storage.data_ptr() for _graph, left in _kept_for_good for storage in left}
    objects = gc.get_objects()  # a million or more
    for tensor in itertools.compress(objects, map(_TENSORS.__contains__, map(id, map(type, objects)))):
        with suppress(RuntimeError):  # the tensor has no memory: another thread traces with it
            if tensor.device == device and tensor.data_ptr() and not _is_allocated(tensor.data_ptr()):
                storage = tensor.untyped_storage()
                # A storage that is not resizable is not PyTorch's: its memory is pages of dynamic VRAM, maybe evicted.
                if storage.resizable() and storage.data_ptr() not in kept:
                    storages.append(storage)
    return storages


def _left_by_capture(device: torch.device, may_free: bool) -> list[torch.UntypedStorage]:
    """Memory that the running capture has allocated and not freed; if `may_free`, garbage is collected first.

    PyTorch's `memory_allocated` cannot tell: the driver counts no memory of a capture.
    """
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return []
    left = _allocated_by_capture(device)
    if left and may_free:
        left.clear()
        gc.collect()
        left = _allocated_by_capture(device)
    return left


def _drop_locals(error: BaseException | None, dropped: set[int]) -> None:
    """Clear locals of the frames in the tracebacks of an error, its cause and its context; `dropped`: ids of errors to skip."""
    if error is None or id(error) in dropped:
        return
    dropped.add(id(error))
    traceback.clear_frames(error.__traceback__)
    for other in (error.__cause__, error.__context__):
        _drop_locals(other, dropped)


def _without_data(result: object) -> list[tuple[torch.Tensor, torch.device]]:
    """For each tensor in a call's result: a tensor like it on the meta device, and the device that it is on."""
    tensors = [leaf for leaf in private.pytree.tree_flatten(result)[0] if type(leaf) is torch.Tensor]
    return [(torch.empty_like(tensor, device="meta"), tensor.device) for tensor in tensors]


def _copied_into(buffers: list[torch.Tensor], result: object) -> object:
    """The result, with its tensors copied into `buffers`."""
    leaves, spec = private.pytree.tree_flatten(result)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if [_kind(leaves[i]) for i in places] != [_kind(buffer) for buffer in buffers]:
        raise ValueError("the result has other tensors than in the call before")
    for i, buffer in zip(places, buffers, strict=True):
        leaves[i] = buffer.copy_(leaves[i])
    return private.pytree.tree_unflatten(leaves, spec)


def _kind(tensor: torch.Tensor) -> tuple:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device


# How far a replay may differ from a plain call, as a share of the result's norm. In a plain call cuBLAS and cuDNN may choose
# other kernels, and TF32 has ten bits. For dtypes with fewer bits, the limit is four times their last bit.
_ROUNDING = 4e-3


def _differ(one: object, other: object) -> bool:
    """Whether two results of a call differ by more than rounding."""
    pairs = [[leaf for leaf in private.pytree.tree_flatten(r)[0] if isinstance(leaf, torch.Tensor)] for r in (one, other)]
    if [_kind(tensor) for tensor in pairs[0]] != [_kind(tensor) for tensor in pairs[1]]:
        return True
    for a, b in zip(*pairs, strict=True):
        limit = max(_ROUNDING, 4 * torch.finfo(b.dtype).eps) if b.is_floating_point() else 0.0
        a, b = (torch.nan_to_num(t.float(), posinf=0.0, neginf=0.0) for t in (a, b))
        if (a - b).norm() > limit * b.norm():
            return True
    return False


@dataclass
class ModelGraphs:
    """The graphs of one model.

    Args:
        graphs: ordered by their last replay.
        seen: keys of calls that have been warmed up; each with `_without_data` of the result.
        failures: key -> why the call is not captured.
        release: frees GPU memory outside the graphs (copies of LoRA), and returns whether it freed any; None: there is none.
        is_check_due: the next replay is to be compared with a plain call.
        checks: how many replays were compared; `differences`: how many of them differed.
        _costs: seconds of each capture, until its check.
        _functions_of_failures: for failures that last when the weights move, the functions that the layers ran.
    """

    graphs: dict[Hashable, Captured] = field(default_factory=dict)
    seen: dict[Hashable, list[tuple[torch.Tensor, torch.device]]] = field(default_factory=dict)
    failures: dict[Hashable, str] = field(default_factory=dict)
    model: ModelState = field(default_factory=ModelState)
    release: Callable[[], bool] | None = None
    code: Hashable = None
    captures: int = 0
    replays: int = 0
    is_check_due: bool = False
    checks: int = 0
    differences: int = 0
    _costs: dict[Hashable, float] = field(default_factory=dict)
    _pool: object = None
    _functions_of_failures: dict[Hashable, list | None] = field(default_factory=dict)
    _never_replayed: set[Hashable] = field(default_factory=set)

    def drop(self) -> None:
        """Free the graphs' memory for other models. If `release` has freed any, this run captures no more graphs."""
        self.forget()
        self._release()

    def forget(self) -> None:
        """Free stale graphs; memory that `release` would free stays, for the next graphs."""
        self._free_graphs()
        self.seen.clear()
        functions = self._functions_of_failures
        self.failures = {k: r for k, r in self.failures.items() if k in functions and functions[k] == self.model.functions}
        self.model.forget()
        self._pool = None

    def _release(self) -> bool:
        release, self.release = self.release, None
        if release is None or not release():
            return False
        self.model.obstacle = self.model.obstacle or "memory was short"
        return True

    @property
    def hold_memory(self) -> bool:
        return bool(self.graphs) or self.release is not None

    def new_run(self, is_warming: bool) -> None:
        self.model.new_run()
        self.failures = {key: reason for key, reason in self.failures.items() if reason != NO_ROOM}
        if is_warming:  # a warmup calls each size once after its capture, but its sizes do not alternate
            self._never_replayed.clear()

    def drop_if_stale(
        self, model: nn.Module, device: torch.device, places: Callable[[nn.Module], object] | None = None
    ) -> None:
        """Drop the graphs if weights, layers or functions have changed, see `ModelState.check_unchanged`."""
        self.model.check_unchanged(model, device, places, self._changed)

    def _changed(self) -> None:
        if self.graphs:
            logger.info("the model's weights or layers have changed: CUDA graphs are captured anew")
        self.forget()

    def call(
        self,
        key: Hashable,
        forward: Callable,
        args: tuple,
        kwargs: dict,
        fixed: dict,
        keep: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
        make_room: Callable[[], bool] = lambda: True,
        code: Callable[[], Hashable] = lambda: None,
        ran_uncompiled: Callable[[], bool] = lambda: False,
        lacks_trace: Callable[[], bool] = lambda: False,
        is_compiling: Callable[[], bool] = lambda: False,
        pays: Callable[[float, float], None] | None = None,
    ) -> object:
        """Replay, capture or run the call; see the module's docstring.

        Args:
            key: all that the call depends on except tensor data: `value_key` of the arguments and more.
            args, kwargs: every tensor in them, nested or not, becomes an input of the graph.
            fixed: keyword arguments that are the same for equal keys.
            keep: pins the weights; yields whether all are where the graphs expect them.
            make_room: frees memory for the intermediates of the call, and returns whether there is enough; called before a
                capture, and when a replay runs out of memory.
            code: returns a value that changes when more of the model has been compiled.
            ran_uncompiled: whether a block ran uncompiled in the call that has just ended; `lacks_trace`: whether a block did
                because no trace was allowed to begin.
            is_compiling: whether code is being compiled for the model; a plain call may run that code before `code` changes.
            pays: called once per capture with the seconds that the capture and its check took, and the seconds by which a
                replay is faster than a plain call. None: nothing is timed.
        """
        self._drop_if_code_is_new(code())
        leaves, spec = private.pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = self.model.device
        if any(t.device != device for t in tensors):  # a scalar on the CPU would be a constant of the graph
            _remember(self.failures, "device", "an input is on another device")
            return forward(*args, **kwargs, **fixed)
        if key in self.seen and key not in self.failures:
            with keep() as in_place:
                captured = self.graphs.pop(key, None) if in_place else None
                if captured is not None:
                    self.graphs[key] = captured
                    self._never_replayed.discard(key)
                    self.replays += 1
                elif in_place:
                    with _all_held(_capture_lock, gpu_locks[device]) as are_held:  # else the next call tries
                        if are_held:
                            self._drop_oldest()
                            if make_room():
                                began = seconds_when_done(device)
                                captured = self._capture(key, forward, leaves, spec, tensors, fixed)
                                self.is_check_due = True
                                _remember(self._costs, key, seconds_when_done(device) - began)
                            else:  # to evict pages, dynamic VRAM would synchronize, which breaks a capture
                                self._fails(key, NO_ROOM)
                        if key in self.graphs:
                            self._never_replayed.add(key)
                if captured is not None:
                    try:
                        replay = functools.partial(captured.replay, tensors)

                        def run() -> object:  # with new containers in each call: models take items out of them
                            again, named = private.pytree.tree_unflatten(leaves, spec)
                            return forward(*again, **named, **fixed)

                        checks, has_other_code = self.checks, lambda: is_compiling() or code() != self.code
                        result = self._checked(_with_room(replay, make_room), run, has_other_code)
                        if self.differences:  # no more graphs for this model; a reference would keep the memory
                            captured = None
                            del replay
                            self.drop()
                        elif pays is not None and self.checks > checks and key in self._costs:
                            self._judge(self._costs.pop(key), run, replay, pays)
                        return result
                    except RuntimeError as error:
                        if not is_out_of_memory(error):
                            raise
                        reason = in_one_line(error)
                    # The caller's tensors are unchanged: a graph works on copies.
                    captured = None
                    del replay  # `replay` holds the graph
                    self._ran_out_of_memory(key, reason)
        before = self.code
        result = forward(*args, **kwargs, **fixed)
        self._drop_if_code_is_new(code())
        # Else some code has never run, or is yet to be traced by a call without a graph: the next call is a warm-up again.
        if not lacks_trace() and (self.code == before or not ran_uncompiled()):
            _remember(self.seen, key, _without_data(result))
        return result

    def _checked(self, replayed: object, run: Callable[[], object], has_other_code: Callable[[], bool]) -> object:
        """The replayed result; if a check is due and finds a difference, the result of the plain call `run`.

        Args:
            has_other_code: whether a plain call may run compiled code where the graph has uncompiled operators.
        """
        if not self.is_check_due or has_other_code():
            return replayed
        try:
            with self._own_random_numbers():
                expected = run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.is_check_due = False
            return replayed
        if has_other_code():
            return replayed
        self.is_check_due = False
        self.checks += 1
        if not _differ(replayed, expected):
            return replayed
        self.differences += 1
        logger.warning("a CUDA graph gave another result than the model itself: CUDA graphs are off for this model")
        return expected

    def _judge(
        self, cost: float, run: Callable[[], object], replay: Callable[[], object], pays: Callable[[float, float], None]
    ) -> None:
        """Time a plain call and a replay for `pays`; right after a check, as the first plain call after a capture allocates its
        memory again, and the first replay of a graph takes longer, too."""
        try:
            with self._own_random_numbers():
                plain, replayed = (_seconds_of(call, self.model.device) for call in (run, replay))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return
        pays(cost + 2 * plain, plain - replayed)

    def _own_random_numbers(self) -> AbstractContextManager[None]:
        """A context that restores the states of the random generators, which the replay has advanced for this call."""
        device = self.model.device
        return torch.random.fork_rng([device] if device is not None and device.type == "cuda" else [])

    def _drop_if_code_is_new(self, code: Hashable) -> None:
        if code != self.code:
            self.code = code
            self._free_graphs()
            self.seen.clear()
            self.failures.clear()  # a capture may have failed because blocks ran uncompiled
            self._functions_of_failures.clear()

    def _free_graphs(self) -> None:
        if self.graphs:
            self.graphs.clear()
            self._never_replayed.clear()
            self._costs.clear()
            give_back(self.model.device)

    def _drop_oldest(self) -> None:
        while len(self.graphs) >= MAX_GRAPHS:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest]
            if oldest in self._never_replayed:
                self._never_replayed.discard(oldest)
                _remember(self.failures, oldest, f"more than {MAX_GRAPHS} kinds of calls take turns")

    def _ran_out_of_memory(self, key: Hashable, reason: str) -> None:
        self._free_graphs()
        self.seen.clear()
        self._pool = None
        fails = self._fails_for_good if self._release() else self._fails  # the next copies count as changed weights
        fails(key, reason)

    def _fails(self, key: Hashable, reason: str) -> None:
        _remember(self.failures, key, reason)
        logger.info("CUDA graph not captured, running without: %s", reason)

    def _capture(
        self, key: Hashable, forward: Callable, leaves: list, spec: object, tensors: list, fixed: dict
    ) -> Captured | None:
        """Capture the call without running it; None if that fails. A graph that only this call may replay is not stored."""
        device = self.model.device
        stream = capture_stream(device)
        left: list[torch.UntypedStorage] = []
        try:
            static = [t.clone(memory_format=torch.preserve_format) for t in tensors]
            buffers = [torch.empty_like(like, device=where) for like, where in self.seen[key]]
            replacements = iter(static)
            copied = [next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = private.pytree.tree_unflatten(copied, spec)
            with torch.cuda.device(device):
                if not self.graphs:  # PyTorch frees a pool with its last graph (CUDACachingAllocator.cpp, `releasePool`)
                    self._pool = torch.cuda.graph_pool_handle()
                graph = torch.cuda.CUDAGraph()
                allocate_workspaces(stream)
                torch.cuda.synchronize(device)
                result, output, failed, is_kept = None, None, None, False
                try:
                    with _recording(graph, self._pool, stream, not others_in_use(device)):
                        try:
                            result = forward(*args, **kwargs, **fixed)
                            output = _copied_into(buffers, result)
                        except BaseException as error:  # the host's interrupt is not an Exception
                            failed = error
                        may_free = _may_free(stream)
                        if may_free:
                            result = None
                            _drop_locals(failed, {id(sys.exc_info()[1])})
                        left = _left_by_capture(device, may_free)
                    if left and failed is not None:
                        graph.replay()  # other code holds these tensors and may read them
                        torch.cuda.synchronize(device)
                except RuntimeError:
                    is_kept = True
                    raise
                finally:
                    if left or is_kept:
                        _keep_for_good(graph, left)
                    if failed is not None:
                        raise failed
        except Exception as error:
            failed = None  # break the reference cycle of this frame and the traceback, which holds the model
            if never_swallowed(error) and not is_out_of_memory(error):
                raise
            torch.cuda.synchronize(device)
            if is_out_of_memory(error):
                self._ran_out_of_memory(key, in_one_line(error))
            else:
                self._fails_for_good(key, in_one_line(error))
            return None
        self.captures += 1
        # In-place work on the inputs while capturing did not run; the replay starts from the caller's values.
        captured = Captured(device, graph, static, output)
        if left:
            self._fails_for_good(key, f"the call keeps {len(left)} of the tensors that it has computed")
        else:
            logger.info("CUDA graph %d captured", self.captures)
            self.graphs[key] = captured
        return captured

    def _fails_for_good(self, key: Hashable, reason: str) -> None:
        """Do not capture the call again until the layers run other functions."""
        self._fails(key, reason)
        _remember(self._functions_of_failures, key, self.model.functions)


def _with_room(replay: Callable[[], object], make_room: Callable[[], object]) -> object:
    """Replay; retry after `make_room`, as the driver may have reused a graph's memory since the last replay."""
    try:
        return replay()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    make_room()
    return replay()


def _seconds_of(run: Callable[[], object], device: torch.device | None) -> float:
    """Seconds until the device has finished `run`."""
    device = device or torch.device("cpu")
    began = seconds_when_done(device)
    run()
    return seconds_when_done(device) - began


def _remember(table: dict[Hashable, Any], key: Hashable, value: object) -> None:
    """Put an entry last, and evict the oldest entries beyond MAX_OTHERS."""
    table.pop(key, None)
    table[key] = value
    while len(table) > MAX_OTHERS:
        del table[next(iter(table))]


def _graphs_for(model: nn.Module) -> ModelGraphs:
    graphs = ModelGraphs()
    weakref.finalize(model, graphs.drop).atexit = False
    return graphs


graphs_of = PerModel(_graphs_for)
