"""What torch.compile is given as a backend: the chosen one, with what compiling ahead of the first call needs."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo import convert_frame

from ..failures.describe import never_swallowed
from ..out_of_place import out_of_place
from .backend import inductor, needs_gradients

logger = logging.getLogger("torch-compile-kit")


class NotRun(Exception):
    """Raised in place of running code that was only to be compiled."""


class NotTried(Exception):
    """Raised in place of running code that another thread is trying."""


class _State(threading.local):
    """Of a thread.

    Args:
        runs: how often compiled code has run.
        ahead: code is compiled and does not run.
        untried: code made ahead, until its kernels have been tried.
        declines: it does not wait for such code of another thread's, see `NotTried`.
        keeping: what is held until PyTorch has kept that code.
        locked: it has the GPU's lock: code is about to be found by others that has not been tried.
        may_be_written: whether a tensor is nobody else's, so that code may be tried on it.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.ahead = False
        self.untried: list[threading.Event] = []
        self.declines = False
        self.keeping = ExitStack()
        self.locked = False
        self.may_be_written: Callable[[torch.Tensor], bool] = lambda _tensor: False


state = _State()
# A capture does not bear that another thread waits for the whole GPU, as measuring a kernel's variants does; nor code that has
# never run, whose kernels are not loaded.
gpu_lock = threading.Lock()
PATIENCE = 10.0


@contextmanager
def ahead(may_be_written: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """While it lasts, this thread's compiled code raises NotRun when it would run: PyTorch has kept it by then.

    Args:
        may_be_written: see `_State`.

    Until then PyTorch's own lock is held, too. PyTorch gives it back when it has traced, before it puts the code where a reset
    by another thread (a node of another pack) has freed the memory meanwhile (torch/csrc/dynamo/eval_frame_cpp.cpp, `extra`):
    that ends the process.
    """
    state.ahead, state.may_be_written = True, may_be_written
    try:
        with state.keeping:
            state.keeping.enter_context(convert_frame.compile_lock)
            yield
    finally:
        state.ahead = False
        while state.untried:
            state.untried.pop().set()
        if state.locked:
            state.locked = False
            gpu_lock.release()


@functools.cache  # PyTorch compares backends by identity before it uses code of theirs
def backend_of(name: str) -> Callable:
    """A backend of torch.compile that counts the runs of what it compiles.

    Args:
        name: a registered backend; `inductor` is ours, see `inductor/backend.py`.
    """

    def backend(graph: torch.fx.GraphModule, example_inputs: list, **options: Any) -> Callable:
        if needs_gradients(example_inputs) and out_of_place(graph.graph):
            graph.recompile()
        make = inductor if name == "inductor" else torch._dynamo.lookup_backend(name)
        compiled = make(graph, example_inputs, **options)
        if state.ahead and not state.locked:
            # Once this returns, PyTorch lets others find the code. Not for ever: who captures may wait for PyTorch's lock.
            state.locked = gpu_lock.acquire(timeout=PATIENCE)
        # PyTorch lets others find the code before its kernels have been tried. Two threads that try the same end with an
        # error: who is done first unloads the variants that the other still measures (triton_heuristics.py,
        # `_release_static_launchers_except`, from 2.13 on).
        tried = threading.Event()
        if state.ahead:
            state.untried.append(tried)
        else:
            tried.set()

        def run(*args: object) -> object:
            if state.ahead:
                state.keeping.close()
                try:
                    _try_kernels(compiled, args)
                finally:
                    tried.set()
                raise NotRun
            if not tried.is_set():
                if state.declines:
                    raise NotTried
                tried.wait(PATIENCE)
            state.runs += 1
            return compiled(*args)

        return run

    backend.__name__ = name
    return backend


def _try_kernels(compiled: Callable, args: tuple) -> None:
    """Have kernels loaded and their variants measured: on a GPU that is a good part of the first run."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not any(t.is_cuda for t in tensors) or not all(map(state.may_be_written, tensors)):
        return
    try:
        compiled(*args)
        torch.cuda.current_stream().synchronize()
    except Exception as error:  # the first real run does it then
        if never_swallowed(error):
            logger.debug("no memory to try kernels beforehand")
        else:
            logger.debug("kernels were not tried beforehand: %s", error)
