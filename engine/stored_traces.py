"""Traces that survive a restart: with one, a process need not trace a block again to find its compiled graph on disk.

What Dynamo makes of a block is bytecode that calls the graph, and guards. PyTorch's own ways to keep both
(torch/_dynamo/package.py, aot_compile.py) refuse classes that are defined inside others, as all layers of ComfyUI are, and drop
the guards that compare addresses. Here only the sources and kinds of the guards are kept. A process that loads a trace builds
the guards anew from the call it is about to make, addresses included, and compares what it got, as text and with names in place
of addresses (`guard_text.py`), with what the first process had: any value, class, function or setting that differs shows, and
the block is traced as ever. All code that was traced is compared too, and last its results with those of the block itself.
"""

from __future__ import annotations

import inspect
import io
import logging
import pickle
import sys
import types
import uuid
from collections.abc import Callable

import torch

from .identities import found_at, functions_in
from .trace_check import TOLERANCE, error_of
from .trace_record import FORMAT, OWN, Trace, can_store

if can_store():
    from torch._C._dynamo.eval_frame import _load_precompile_entry
    from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState, get_builtins_dict
    from torch._dynamo.package import SerializedCode
    from torch._dynamo.utils import CleanupHook, CleanupManager, counters
    from torch._guards import Guard, GuardsSet, TracingContext, tracing
    from torch.utils._ordered_set import OrderedSet

    from .guard_text import BuiltGuards

    class _Guard(Guard):
        """Leaves it to the caller to tell of an error."""

        def create(self, builder: object) -> object:
            return self.create_fn(builder, self)


logger = logging.getLogger("torch-compile-kit")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._unique = uuid.uuid4().hex

    def persistent_load(self, reference: str) -> str:
        return f"{reference}_{self._unique}" if reference.startswith(OWN) else reference


def arguments_of(own: types.FunctionType, args: tuple, kwargs: dict) -> dict[str, object]:
    """The local variables that a call begins with."""
    given = inspect.signature(own).bind(*args, **kwargs)
    given.apply_defaults()
    closed = zip(own.__code__.co_freevars, own.__closure__ or (), strict=True)
    return {**given.arguments, **{name: cell.cell_contents for name, cell in closed}}


def guards_of(code: types.CodeType) -> list[object] | None:
    """Those of all code that PyTorch holds for a code object (a reset drops what was compiled); None where it does not tell."""
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_debug_get_cache_entry_list"):
        return None
    entries = frames._debug_get_cache_entry_list(code)
    if can_store():
        entries = [*entries, *frames._debug_get_precompile_entries(code)]
    found = [entry.guard_manager for entry in entries]
    return [guards for guards in found if type(guards).__name__ != "DeletedGuardManagerWrapper"]


def loaded_in(code: types.CodeType) -> int:
    """How many times other code was loaded for it, which PyTorch does not count among its variants."""
    return len(torch._C._dynamo.eval_frame._debug_get_precompile_entries(code)) if can_store() else 0


def load(stored: bytes, own: types.FunctionType, args: tuple, kwargs: dict) -> bool:
    """Give a function compiled code that another process has made of it.

    Args:
        stored: of `dumps`; what is in it is code, and may run while it is read.
        own: the function, as given to `torch.compile`. Called with copies of the arguments, to compare results.
        args, kwargs: of the call that it is about to get.

    Returns:
        False if the trace is of another call, of other code or settings, or if its results are others.

    Raises:
        Exception: of any kind, when the trace or the graph cannot be read.
    """
    version, content = _Unpickler(io.BytesIO(stored)).load()
    if version != FORMAT or torch.overrides._get_current_function_mode_stack():
        return False
    trace = Trace(**content)
    for (module, name), digest in trace.code.items():
        if functions_in(found_at(module, name)) != digest:
            logger.debug("stored trace of %s: %s.%s is another", own.__qualname__, module, name)
            return False
    scope = own.__globals__
    for alias, module in trace.imports.items():
        scope.setdefault(alias, sys.modules[module])
    if trace.builtins:
        scope.setdefault(trace.builtins, get_builtins_dict(scope))
    arguments = arguments_of(own, args, kwargs)
    guards = _guards_for(trace, own, arguments)
    if guards is None:
        return False
    compiled = _shown(own.__qualname__, _compiled(trace.entry))
    code = SerializedCode.to_code_object(trace.bytecode)
    names = {trace.graph: torch._dynamo.disable(compiled)}
    names |= {name: sys.modules[module] for name, module in trace.modules.items()}
    CleanupManager.instance[code] = [CleanupHook.create(scope, name, value) for name, value in names.items()]
    made = types.FunctionType(code, scope, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    if (error := error_of(made, own, args, kwargs)) > TOLERANCE:
        logger.info("%s: stored code differs from eager by %.2g and is compiled anew.", own.__qualname__, error)
        return False
    if not guards.check(arguments):  # the first call of a block may set what it looks at
        return False
    _load_precompile_entry(own.__code__, guards, code)
    counters["stats"]["unique_graphs"] += 1
    return True


def _guards_for(trace: Trace, own: types.FunctionType, arguments: dict) -> object | None:
    state = dict(trace.state)
    shape_code_parts = state.pop("shape_code_parts")
    graph = OutputGraphGuardsState(
        local_scope=arguments,
        global_scope=own.__globals__,
        torch_function_mode_stack=[],
        functorch_layers=[],
        dual_level=-1,
        _guards=GuardsSet(OrderedSet(_Guard(source, create) for source, create in trace.guards)),
        skip_guards_check=True,
        name_of_builtins_dict_key_in_fglobals=trace.builtins,
        **state,
    )
    try:
        built = BuiltGuards(own.__code__, OutputGraphCommon(graph), shape_code_parts=shape_code_parts, save_guards=True)
    except Exception as error:  # an attribute is missing, or no tensor
        logger.debug("stored trace of %s: %s: %s", own.__qualname__, type(error).__name__, error)
        return None
    guards, same = built.guard_manager, built.digest(trace.builtins) == trace.digest
    # Nobody else may get the address of what a guard compares by it.
    guards.kept = [value for value, _name in built.named.values()]
    built.release()
    del built.guard_manager  # PyTorch keeps `built` as long as what is in `kept` lives
    if same and guards.check(arguments):
        return guards
    logger.debug("stored trace of %s: other guards %s", own.__qualname__, built.unnamed)
    return None


def _compiled(entry: bytes) -> Callable:
    """The graph, read from inductor's cache (torch/_functorch/_aot_autograd/aot_autograd_result.py)."""
    import torch._inductor.async_compile  # what follows uses it, and does not import it
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    result = pickle.loads(entry)
    result.guards_expr = None  # they are among the guards of the trace
    fake = torch._subclasses.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    with tracing(TracingContext(fake)):
        compiled = result.wrap_post_compile(
            [],
            result.sanitized_aot_config,
            {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": BoxedDeviceIndex(None)},
        )

    return lambda *inputs: compiled(list(inputs))


def _shown(name: str, compiled: Callable) -> Callable:
    """Compiled code that a profiler shows, as it does other compiled code."""

    def forward(*inputs: object) -> object:
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"Torch-Compiled Region: {name}"):
                return compiled(*inputs)
        return compiled(*inputs)

    return forward
