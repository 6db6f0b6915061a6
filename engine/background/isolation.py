"""Confine to the worker thread what PyTorch does to the whole process while it compiles."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from ..torch_compat import private
from ..torch_settings import SharedScope, attribute, entry

# By `threading.get_ident`.
_isolated: set[int] = set()


def _is_isolated() -> bool:
    return threading.get_ident() in _isolated


def _no_op(*_args: object, **_kwargs: object) -> None: ...


def _no_statistics(*_args: object, **_kwargs: object) -> dict:
    raise RuntimeError("a thread that compiles asks for no memory statistics")  # inductor then goes on without


def _dispatch_by_thread(replacement: Callable) -> Callable[[Callable], Callable]:
    """A wrapper: isolated threads run `replacement`, the others the wrapped function."""
    return lambda original: lambda *args, **kwargs: (replacement if _is_isolated() else original)(*args, **kwargs)


_fx = private.fx_symbolic_trace
# Name -> (how the function is read and written, what isolated threads run in its place).
_REPLACED: dict[str, tuple[tuple, Callable]] = {
    # AOTAutograd saves the random states before it traces and puts them back after it (`preserve_rng_state`): seconds later, in
    # which the sampler has drawn its noise.
    "python": (attribute(random, "setstate"), _no_op),  # Dynamo, of the trace that warms it up
    "cpu": (attribute(torch.random, "set_rng_state"), _no_op),
    "cuda": (attribute(torch.cuda, "set_rng_state"), _no_op),
    # Dynamo restores these after a trace, which would undo what a loader has set or reset on another thread meanwhile.
    "dtype": (attribute(torch, "set_default_dtype"), _no_op),
    "deterministic": (attribute(torch, "use_deterministic_algorithms"), _no_op),
    "fp32": (private.switch("set_fp32_precision"), _no_op),
    # On machines without a GPU tracing gives the process a device guard that goes with the thread
    # (c10/core/impl/FakeGuardImpl.h): the next to trace crashes.
    "guard": (private.switch("ensure_device_guard"), _no_op),
    # Trying a kernel that writes to its inputs asks for room to copy them (torch/_inductor/runtime/triton_heuristics.py,
    # `copy_args_to_cpu_if_needed`), and waits for the allocator while it holds the GIL: see `TracedGraph._make_job`.
    "memory": (attribute(torch.cuda.memory, "memory_stats_as_nested_dict"), _no_statistics),
    # What is traced with FX gets each call of a module in the process, and refuses those it does not know
    # (torch/fx/_symbolic_trace.py, `Tracer.trace`). What compiling traces are functions.
    "modules": (private.switch("patch_method"), _no_op),
}


def _is_fx_symbolic_tracing() -> bool:
    """Replaces the code of PyTorch's function, so names are those of its module. Up to 2.14 the flag is the process's, and
    compiled code of all threads refuses to run while one thread traces."""
    traced = _is_fx_tracing_flag and torch_compile_kit_traces()  # type: ignore[name-defined]  # noqa: F821
    return traced and not torch.compiler.is_compiling()


_functions = SharedScope({key: switch for key, (switch, _) in _REPLACED.items()})
_switches: dict[str, tuple] = {}
if hasattr(_fx, "_is_fx_tracing_flag") and hasattr(_fx, "is_fx_symbolic_tracing"):  # later versions have a flag per thread
    _switches["tracing"] = attribute(_fx.is_fx_symbolic_tracing, "__code__")
    _switches["traces"] = entry(lambda: vars(_fx), "torch_compile_kit_traces")
_fx_scope = SharedScope(_switches)


@contextmanager
def isolated() -> Iterator[None]:
    """A context that limits to this thread what compiling on this thread would change for the whole process."""
    _isolated.add(threading.get_ident())
    try:
        with (
            _functions.wrapping(**{key: _dispatch_by_thread(replacement) for key, (_, replacement) in _REPLACED.items()}),
            _fx_scope.applied(traces=_is_isolated, tracing=_is_fx_symbolic_tracing.__code__),
        ):
            yield
    finally:
        _isolated.discard(threading.get_ident())


def warm_up_dynamo() -> None:
    """Trace once: a process's first trace is a second slower than the next, as Dynamo imports and fills tables."""

    def block(x, weight):
        y = functional.layer_norm(x, x.shape[-1:]) @ weight
        heads = y.view(y.shape[0], -1, 2, 4).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads)
        return x + functional.gelu(mixed).transpose(1, 2).reshape(x.shape)

    x = torch.zeros(2, 3, 8)
    for dimension in (0, 1):  # torch.compile(dynamic=True) sets the process while it is called
        private.maybe_mark_dynamic(x, dimension)
    with isolated(), torch.inference_mode():
        torch.compile(block, backend="eager")(x, torch.zeros(8, 8))
