"""Name the code of a graph, get the code from the store or from the compile process, and load it."""

import functools
import gc
import hashlib
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..background.thread import Postponed
from ..cache import code_store, shared
from ..cache.environment import environment
from ..files import write_whole
from ..log import logger
from ..tensor_spec import hint, is_symbol
from ..threads import in_one_piece, started, yielding
from ..torch_compat import private
from ..torch_settings import SharedScope, folder_scope
from . import lowering_settings, wire
from .artefact import Code, LowerInline
from .client import compile_process, folders
from .inputs import Inputs

# Options for which lowering runs no kernel. Other options come with a mode that tunes.
NOT_MEASURED = {"fallback_random", "triton.cudagraphs"}
# How many variants of a graph's code are kept: lowering may add guards that do not hold for other sizes.
VARIANTS = 8


@dataclass(frozen=True)
class Request:
    """All that determines the code of a graph."""

    text: str  # for the compile process, as JSON
    key: str  # SHA-256 of the text, versions and device, without the sizes that the symbols had: code for one fits others
    sizes: tuple[int, ...]  # values of the sizes among the inputs, to check the guards that lowering adds
    device: torch.device
    measures: bool = False  # lowering runs kernels on the card
    inputs: Inputs | None = None  # to load and tune kernels on before the first run; None: only that run may load them


def request_for(graph: fx.GraphModule, fakes: Sequence[Any], options: dict[str, Any], device: torch.device) -> Request:
    """Serialize a graph that has just been traced, in the call that traced it. LowerInline: the graph cannot be serialized."""
    if any(isinstance(fake, torch.Tensor) and fake.requires_grad for fake in fakes) and torch.is_grad_enabled():
        raise LowerInline("it has a backward")
    described = wire.dumps(graph, fakes)
    if described["sources"] or described["operators"]:  # layouts are looked up by names that these modules register
        digests = {module: wire.digest_of(module) for module in compile_process.modules()}
        described["sources"] |= {module: digest for module, digest in digests.items() if digest is not None}
    request = {"graph": described, "settings": lowering_settings.now(device), "options": options}
    symbols = [[positive, lower, upper] for positive, _hint, lower, upper in described["symbols"]]
    named = [{**request, "graph": {**described, "symbols": symbols}}, environment()]
    try:
        text, name = json.dumps(request), json.dumps(named, sort_keys=True)
    except TypeError as error:
        raise LowerInline(f"its options are no text ({error})") from error
    sizes = tuple(hint(fake) for fake in fakes if is_symbol(fake))
    tuning = (getattr(private.inductor_config, name, False) for name in ("max_autotune", "max_autotune_gemm"))
    measures = bool(options.keys() - NOT_MEASURED) or any(tuning)
    key = hashlib.sha256(name.encode()).hexdigest()
    return Request(text, key, sizes, device, measures, Inputs.of(graph, fakes))


def holds(guards: str | None, sizes: Sequence[int]) -> bool:
    """Whether the guards of code hold for sizes among the inputs; not if they cannot be evaluated."""
    try:
        return guards is None or bool(private.ShapeEnv().evaluate_guards_expression(guards, list(sizes)))
    except Exception as error:
        logger.debug("guards of kept code: %s", error)
        return False


def obtain(request: Request, block: str, patient: bool, distrusted: str | None = None) -> Code:
    """The code of a request; errors: see client.py.

    Args:
        block: the class of the block, for people who look at the entries.
        patient: where another machine makes this code, raise `Postponed` instead of making it here as well.
        distrusted: name of an entry that could not be loaded; it is replaced.
    """
    store, others = code_store.current(), shared.configured()
    get = store.get if store is not None else lambda name: None
    kept = _kept(get, request, distrusted)
    if isinstance(kept, Code):
        return kept
    if others is None or distrusted is not None:
        return _make(request, block, patient, kept)
    claimed = kept
    if not (is_claimed := others.claim(claimed)) and patient:
        raise Postponed("another worker compiles this graph")
    try:
        kept = _kept(get, request, distrusted)  # the worker that had the claim may have compiled the graph meanwhile
        return kept if isinstance(kept, Code) else _make(request, block, patient, kept)
    finally:
        if is_claimed:
            others.release(claimed)


def _make(request: Request, block: str, patient: bool, name: str) -> Code:
    """Have the compile process make the code, and keep it under a name."""
    store, others = code_store.current(), shared.configured()
    code = compile_process.lower(request.text, patient, request.measures)
    if not holds(code.guards, request.sizes):
        raise LowerInline("the guards of its code do not hold for its own sizes")
    if store is not None:  # else nobody knows which names other machines have given to code of this graph
        code = replace(code, inputs=request.inputs.given if request.inputs is not None else None)
        content = code.packed({"class": block, "environment": environment()})
        store.put(name, content)
        if others is not None:
            others.put(name, content)
    return replace(code, name=name)


def is_on_disk(request: Request) -> bool:
    """Whether this machine seems to have code of a request, so that it only has to be loaded."""
    store = code_store.current()
    return store is not None and store.has(request.key)


def names_for(request: Request) -> Iterator[str]:
    """Names of the entries that may hold code of a request."""
    return (f"{request.key}-{number}" if number else request.key for number in range(VARIANTS))


def _kept(get: Callable[[str], bytes | None], request: Request, distrusted: str | None) -> Code | str:
    """Kept code that holds for the request's sizes, else the name under which to keep new code."""
    for name in names_for(request):
        content = get(name) if name != distrusted else None
        if content is None:
            break
        try:
            code = Code.unpacked(content, name)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the entry %s cannot be read (%s): its code is compiled anew", name, error)
            break
        if code.is_for_this_cpu and holds(code.guards, request.sizes):
            return code
    return name


def load(code: Code) -> Callable[..., Any]:
    """Load code; returns a function of the graph's inputs. For damaged code PyTorch may raise any error."""
    scratch = compile_process.scratch
    for name, content in code.files.items():
        file = Path(scratch, name)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
    places = folder_scope.applied(**folders(scratch))
    workers = _workers_scope.wrapping(use_process_pool=_on_other_threads)
    with yielding(), places, workers, _without_cuda_graphs():
        artefact = private.AOTCompiledArtifact.deserialize(code.artefact)
    return lambda *args: artefact(*args)


@contextmanager
def _without_cuda_graphs() -> Iterator[None]:
    """A context with inductor's CUDA graphs off: code was not lowered for them, and fails if loaded with the setting on. Up to
    PyTorch 2.11 the setting is on for all threads while another node compiles with CUDA graphs, under Dynamo's lock."""
    if not private.inductor_config.triton.cudagraphs:
        yield
        return
    with private.compile_lock, private.inductor_config.patch({"triton.cudagraphs": False}):
        yield


_workers_scope = SharedScope({"use_process_pool": private.switch("use_process_pool")})


def _on_other_threads(use_process_pool: classmethod) -> classmethod:
    """Keep PyTorch from starting a process for compiling kernels when code is loaded (torch/_inductor/async_compile.py): the
    kernels are there already, and the process takes half a GiB. On other threads, which may compile, PyTorch still does."""
    thread = threading.get_ident()
    return classmethod(lambda cls: threading.get_ident() != thread and use_process_pool.__get__(None, cls)())


def get_ready_to_compile(starts: bool = True, imports: bool = True) -> None:
    """Start the compile process, and import what tracing needs, each on a thread of its own. If the store has code of these
    versions, or machines share code, the process may not be needed: then the first graph that has no code starts it."""
    global _not_before
    now = time.monotonic()
    if starts and compile_process.pid is None and now >= _not_before:
        _not_before = now + START_AGAIN_SECONDS
        started(threading.Thread(target=_start_unless_kept, name="torch-compile-kit start", daemon=True))
    if imports:
        import_ahead()


# `get_ready_to_compile` runs in each call of a model until something is compiled.
START_AGAIN_SECONDS = 10.0
_not_before = 0.0


def _start_unless_kept() -> None:
    store = code_store.current()
    if shared.configured() is None and (store is None or not store.has_current()):
        compile_process.start()


# Private names of PyTorch: tracing and `load` need the modules that define them.
_IMPORTED = "callback_handler", "AOTCompiledArtifact", "autograd_cache", "triton_heuristics", "codegen"


@functools.cache
def import_ahead() -> threading.Thread:
    """Import what tracing and `load` need, seconds of Python, on a thread of its own. Once a process."""
    thread = threading.Thread(target=in_one_piece, args=[_import], name="torch-compile-kit import", daemon=True)
    started(thread)
    return thread


def wait_for_imports() -> None:
    importing = import_ahead()
    if importing.ident is not None:  # else no thread could be started
        importing.join()


def is_imported() -> bool:
    """Whether `import_ahead` is done, or could start no thread: then the first trace imports the modules."""
    return not import_ahead().is_alive()


def _import() -> None:
    began = time.perf_counter()
    with yielding(), suppress(private.MissingName):
        for name in _IMPORTED:
            getattr(private, name)
        for module in private.IMPORTED_BY_TRACES:
            with suppress(Exception):  # a PyTorch without it, or one built without torch.distributed
                importlib.import_module(module)
    if gc.isenabled():  # not during a capture
        gc.collect()  # so many new objects would trigger this soon, in the call that traces: 0.3 s on a slow core
    logger.debug("imported what loading code needs in %.1f s", time.perf_counter() - began)
    started(threading.Thread(target=_digest, name="torch-compile-kit import", daemon=True))  # no trace waits for it


def _digest() -> None:
    """Make what the first `load` needs: digests of the files of PyTorch and Triton, and Triton's library for the driver, for
    which a C compiler runs."""
    with yielding():
        with suppress(Exception):  # `load` raises it again
            private.torch_key()
        with suppress(Exception):
            if torch.cuda.is_initialized():
                private.triton_hash_with_backend()
