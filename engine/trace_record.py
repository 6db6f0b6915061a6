"""Keep what Dynamo has made of a block, so that another process need not trace it: see `stored_traces.py`."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import pickle
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch.utils import _pytree as pytree

from .identities import Unnamed, code_in, found_at, functions_in, nested_in
from .scopes import SharedScope

try:
    from torch._dynamo.convert_frame import DynamoOutput
    from torch._dynamo.guards import TensorWeakRef, convert_int_to_concrete_values
    from torch._dynamo.package import SerializedCode
    from torch._guards import Source

    from .guard_text import BuiltGuards

    _build_guards = DynamoOutput.build_guards
except (ImportError, AttributeError):  # another PyTorch
    _build_guards = None

logger = logging.getLogger("torch-compile-kit")
FORMAT = 1
# The version whose internals this follows; with others each process traces, as it would without this file.
TESTED = "2.11."
_GRAPH = "__compiled_fn_"
OWN = "__stored_trace_"


@dataclass
class Trace:
    """What one compilation made: all but the graph itself, which is in inductor's own cache.

    Args:
        guards: source and kind of each, in their order.
        state: what else guards are built from (torch/_dynamo/output_graph.py, OutputGraphGuardsState).
        digest: of the guards' text.
        code: module and name -> digest, of all that was traced and is not in what the guards name.
        imports: global names that guards and bytecode use -> modules.
        modules: the same for names that are of this trace alone.
        builtins: global name of the dict of builtins, if it is used.
        graph: global name of the compiled graph.
        entry: AOTAutograd's entry for it, pickled.
    """

    guards: list[tuple]
    state: dict[str, object]
    digest: str
    code: dict[tuple[str, str], str]
    imports: dict[str, str]
    modules: dict[str, str]
    builtins: str | None
    graph: str
    entry: bytes
    bytecode: SerializedCode


class _Recorder(threading.local):
    """Where traces of this thread are put; None: nowhere. Only those of `code` are kept."""

    traces: list[Trace | None] | None = None
    code: types.CodeType | None = None


recorder = _Recorder()


def can_store() -> bool:
    """Whether this PyTorch's traces can be kept."""
    return _build_guards is not None and torch.__version__.startswith(TESTED) and sys.version_info >= (3, 11)


def _recording(output: DynamoOutput, code: types.CodeType, *args: object, **kwargs: object) -> object:
    """In place of `DynamoOutput.build_guards`, with the same result; adds a trace, or None if it cannot be kept."""
    if recorder.traces is None or code is not recorder.code:
        if recorder.traces is not None:  # the rest of a block after a graph break, or a function that it calls
            recorder.traces.append(None)
        return _build_guards(output, code, *args, **kwargs)
    given = inspect.signature(_build_guards).bind(output, code, *args, **kwargs).arguments
    hooks, existing = given.get("hooks"), given.get("cache_entry", given.get("cache_entries"))  # the latter from torch 2.13
    graph = output.tracer_output.output_graph
    fail, chosen = (hooks.guard_fail_fn, hooks.guard_filter_fn) if hooks else (None, None)
    built = BuiltGuards(code, graph, existing, fail, chosen, save_guards=True)
    try:
        recorder.traces.append(_trace_of(built, graph, output.bytecode))
    except Exception as error:  # the block itself is compiled
        logger.debug("%s is traced in each process: %s: %s", code.co_qualname, type(error).__name__, error)
        recorder.traces.append(None)
    built.release()
    return built


def _switch() -> dict:
    if _build_guards is None:
        return {}
    return {"build_guards": ((lambda: DynamoOutput.build_guards), (lambda f: setattr(DynamoOutput, "build_guards", f)))}


# A class is the process's whatever the version of PyTorch. Dynamo traces on one thread at a time (`compile_lock`).
recording_scope = SharedScope(_switch(), of_process=True)
RECORDING = {"build_guards": _recording} if can_store() else {}


def _trace_of(built: BuiltGuards, graph: object, bytecode: types.CodeType) -> Trace:
    if built.text is None:
        raise Unnamed(built.unnamed)
    if graph.torch_function_mode_stack or graph.functorch_layers or graph.dual_level >= 0:
        raise Unnamed("a mode of PyTorch")
    builtins = graph.name_of_builtins_dict_key_in_fglobals
    graphs = [name for name in graph.installed_globals if name.startswith(_GRAPH)]
    if len(graphs) != 1:
        raise Unnamed(f"{len(graphs)} graphs")
    modules = {name: graph.global_scope[name] for name in graph.installed_globals if name not in (builtins, graphs[0])}
    if not all(isinstance(module, types.ModuleType) for module in modules.values()):
        raise Unnamed(f"globals {sorted(modules)}")
    return Trace(
        guards=[(guard.originating_source, _plain(guard.create_fn)) for guard in built.sorted],
        state={
            "guard_on_key_order": graph.guard_on_key_order,
            "input_source_to_sizes_strides": pytree.tree_map(
                convert_int_to_concrete_values, graph.input_source_to_sizes_strides
            ),
            "current_device": graph.current_device,
            "global_state_guard": graph.global_state_guard,
            "_aotautograd_guards": graph.aotautograd_guards,
            "shape_code_parts": built.shape_code_parts,
        },
        digest=built.digest(builtins),
        code=_digests([value for value, _name in built.named.values()], graph.tracing_context.traced_code),
        imports=dict(graph.import_sources),
        modules={name: module.__name__ for name, module in modules.items()},
        builtins=builtins,
        graph=graphs[0],
        entry=pickle.dumps(_innermost(graph.global_scope[graphs[0]]).serialize()),
        bytecode=SerializedCode.from_code_object(bytecode),
    )


def _plain(create: Callable) -> Callable:
    """The kind of a guard without the object that it was made for: that is found by its source."""
    if not isinstance(create, functools.partial):
        return create

    def without(value: object) -> object:
        if isinstance(value, TensorWeakRef | weakref.ref):
            return None
        if isinstance(value, torch.Tensor | torch.nn.Module):
            raise Unnamed(type(value).__name__)
        return value

    keywords = {name: without(value) for name, value in create.keywords.items()}
    return functools.partial(create.func, *map(without, create.args), **keywords)


def _digests(named: Iterable[object], traced: list[types.CodeType]) -> dict[tuple[str, str], str]:
    """Of functions enough that all code that was traced is in one of them, or in what the guards name."""
    found: dict[tuple[str, str], str] = {}
    known = {inner for value in named for code in code_in(value).values() for inner in nested_in(code)}
    for code in traced:
        if code in known:
            continue
        module = getattr(inspect.getmodule(code), "__name__", "")
        name = code.co_qualname.partition(".<locals>")[0]
        value = found_at(module, name)
        known |= {inner for outer in code_in(value).values() for inner in nested_in(outer)}
        if code not in known:
            raise Unnamed(f"{code.co_qualname} is not found where it says that it is")
        found[module, name] = functions_in(value)
    return found


def _innermost(function: Callable) -> Callable:
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


class _Pickler(pickle.Pickler):
    """Writes references for names that must be others in each process."""

    def __init__(self, file: io.BytesIO, trace: Trace):
        super().__init__(file)
        self._references = {name: f"{OWN}{number}" for number, name in enumerate((trace.graph, *trace.modules))}
        if trace.builtins:
            # Of the same length and beginning, by which guards are sorted, and never one of Dynamo's own.
            self._references[trace.builtins] = re.sub(r"\d+$", lambda number: "k" * len(number[0]), trace.builtins)

    def persistent_id(self, value: object) -> str | None:
        return self._references.get(value) if type(value) is str else None

    def reducer_override(self, value: object) -> object:
        """PyTorch hands some sources fields that their classes do not take (DefaultsSource)."""
        if isinstance(value, Source) and is_dataclass(value):
            return type(value), tuple(getattr(value, part.name) for part in fields(value) if part.init)
        return NotImplemented


def dumps(trace: Trace) -> bytes:
    """A trace as bytes, without the name of our class: that is another in each folder that a user may put us in."""
    file = io.BytesIO()
    _Pickler(file, trace).dump((FORMAT, vars(trace)))
    return file.getvalue()
