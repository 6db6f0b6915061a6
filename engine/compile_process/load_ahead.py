"""Load kept code after the server has started, while nobody waits, so that a trace finds the code ready.

Reading code, and loading and tuning its kernels, takes 1 to 2 s for each kind of block beside the sampler's thread.
"""

import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from ..background.thread import Job, compiler
from ..cache.code_store import CodeStore, current
from ..devices import gpu_locks
from ..failures.describe import in_one_line
from ..inductor import kitchen
from ..log import logger
from .artefact import Code
from .inputs import Inputs
from .obtain import Request, holds, load, names_for, wait_for_imports

# How many entries are loaded, the most recently used first: a model has one to four graphs.
MOST = 16
# Name of the entry -> its code, and the function to call.
_ready: dict[str, tuple[Code, Callable]] = {}


def load_ahead(store: CodeStore, goes_on: Callable[[], bool]) -> None:
    """Import what loading needs, and have the worker load the entries that were used last. `goes_on`: asked before each."""
    wait_for_imports()
    kitchen.register()
    for name in [*store.entries()][:MOST]:
        if not goes_on():
            return
        try:
            if store.is_current(name):
                _queue(name, store.read(name, is_use=False) or b"", goes_on)
        except Exception as error:
            _note_error(name, error)


def _queue(name: str, content: bytes, goes_on: Callable[[], bool]) -> None:
    code = Code.unpacked(content, name)
    inputs = Inputs(code.inputs) if code.inputs is not None else None
    if code.is_for_this_cpu and (inputs is not None or not torch.cuda.is_available()):
        device = torch.device("cpu") if inputs is None else inputs.device
        action = functools.partial(_load, name, code, inputs, device, goes_on)
        compiler.submit(Job(weakref.ref(compiler), action, device, functools.partial(_note_error, name)))


def _load(name: str, code: Code, inputs: Inputs | None, device: torch.device, goes_on: Callable[[], bool]) -> None:
    if not goes_on():
        return
    began = time.perf_counter()
    with gpu_locks[device]:
        run = load(code)
        if inputs is not None:
            inputs.warm_up(run, 0)
            torch.cuda.empty_cache()  # other threads cannot use memory that is cached for the worker's stream
    _ready[name] = replace(code, artefact=b"", files={}), run
    logger.debug("the entry %s was loaded ahead in %.1f s", name, time.perf_counter() - began)


def _note_error(name: str, error: Exception) -> None:
    logger.debug("the entry %s is not loaded ahead: %s", name, in_one_line(error))


def ready_for(request: Request) -> tuple[Code, Callable] | None:
    """Code of a request that was loaded ahead, and the function to call."""
    for name in names_for(request):
        ready = _ready.get(name)
        if ready is not None and holds(ready[0].guards, request.sizes):
            if (store := current()) is not None:
                store.note_use(name)
            return ready
    return None
