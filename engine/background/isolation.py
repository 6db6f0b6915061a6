"""What PyTorch does to the whole process while it compiles, kept to the threads that compile behind others' work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..torch_settings import SharedScope

# By `threading.get_ident`.
_isolated: set[int] = set()


def _is_isolated() -> bool:
    return threading.get_ident() in _isolated


def _nothing(*_args: object, **_kwargs: object) -> None: ...


def _unknown(*_args: object, **_kwargs: object) -> dict:
    raise RuntimeError("a thread that compiles asks for no statistics of memory")  # inductor then goes on without


def _another_for_isolated(found: Callable, ours: Callable) -> Callable:
    """A function that is another one for isolated threads."""
    return lambda *args, **kwargs: (ours if _is_isolated() else found)(*args, **kwargs)


_fx = torch.fx._symbolic_trace
# Function -> what isolated threads run in its place.
_REPLACED: dict[str, tuple[Any, str, Callable]] = {
    # PyTorch saves random states, TF32 and the like before it traces and puts them back after it
    # (torch/_dynamo/convert_frame.py, `preserve_global_state`): seconds later, in which the sampler has drawn its noise, or a
    # loader has begun or ended.
    "python": (random, "setstate", _nothing),
    "cpu": (torch.random, "set_rng_state", _nothing),
    "cuda": (torch.cuda, "set_rng_state", _nothing),
    "precision": (torch._C, "_set_fp32_precision_setter", _nothing),
    "dtype": (torch, "set_default_dtype", _nothing),
    "deterministic": (torch, "use_deterministic_algorithms", _nothing),
    # On machines without a GPU tracing gives the process a device guard that goes with the thread
    # (c10/core/impl/FakeGuardImpl.h): the next to trace crashes.
    "guard": (torch._C, "_ensureCUDADeviceGuardSet", _nothing),
    # Trying a kernel that writes to its inputs asks for room to copy them (torch/_inductor/runtime/triton_heuristics.py,
    # `copy_args_to_cpu_if_needed`), and waits for the allocator with Python's lock in hand: see `thread._unused_bytes`.
    "memory": (torch.cuda.memory, "memory_stats_as_nested_dict", _unknown),
    # From 2.13 on `torch.compiler.is_compiling()` is true for all threads while one compiles: ComfyUI then neither looks for
    # interrupts nor offloads with streams (comfy/ops.py, comfy/model_management.py).
    "compiling": (torch.compiler, "_compile_session_context", nullcontext),
    # What is traced with FX gets each call of a module in the process, and refuses those it does not know
    # (torch/fx/_symbolic_trace.py, `Tracer.trace`). What compiling traces are functions.
    "modules": (_fx._Patcher, "patch_method", _nothing),
}


def _is_fx_symbolic_tracing() -> bool:
    """In place of PyTorch's code for it, with its module's names: that something is traced with FX is a fact of the process up
    to 2.14, and compiled code of all threads refuses to run meanwhile. It concerns the thread that traces."""
    traced = _is_fx_tracing_flag and torch_compile_kit_traces()  # type: ignore[name-defined]  # noqa: F821
    return traced and not torch.compiler.is_compiling()


def _switch(owner: object, name: str) -> tuple:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


_switches = {key: _switch(*found) for key, (*found, _) in _REPLACED.items() if hasattr(*found)}
if hasattr(_fx, "_is_fx_tracing_flag"):  # others keep it for each thread
    _switches["tracing"] = _switch(_fx.is_fx_symbolic_tracing, "__code__")
    _switches["traces"] = (lambda: None), (lambda found: _name_in_fx(found))


def _name_in_fx(found: Callable | None) -> None:
    if found is None:
        _fx.__dict__.pop("torch_compile_kit_traces", None)
    else:
        _fx.__dict__["torch_compile_kit_traces"] = found


_scope = SharedScope(_switches)


@contextmanager
def isolated() -> Iterator[None]:
    """While it lasts, what compiling on this thread does to the process stays with the thread."""
    replaced = {
        key: _another_for_isolated(getattr(*found), ours) for key, (*found, ours) in _REPLACED.items() if hasattr(*found)
    }
    _isolated.add(threading.get_ident())
    try:
        with _scope.applied(traces=_is_isolated, **replaced, tracing=_is_fx_symbolic_tracing.__code__):
            yield
    finally:
        _isolated.discard(threading.get_ident())
