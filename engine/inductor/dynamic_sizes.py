"""Let Dynamo trace `range`, `sorted`, `in` and `torch.linspace` over sizes that may vary.

It makes the arguments of `range` and `linspace` constants, which is a graph for each size (a block that works in chunks), and
cannot sort what is no constant, which is a graph break (slices of tokens). That a constant is in a list of numbers that may
vary (`1 in cond_or_uncond`) it denies before 2.15, without a word (pytorch#153366). While a block of ours is traced, such a
call runs a function below instead: the same result, from steps that Dynamo can follow. The graph then depends on how often a
loop runs and which size is the larger, no more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

try:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import BaseListVariable, SymNodeVariable, TupleVariable, VariableTracker, lists

    _call_function = InstructionTranslatorBase.call_function
except (ImportError, AttributeError):  # another PyTorch: those blocks take a graph for each size, or a break
    _call_function = lists = None

from ..torch_settings import SharedScope

_iter_contains: Any = getattr(lists, "iter_contains", None)


def steps_of(start: int, stop: int, step: int = 1) -> list[int]:
    """`range` of two or three arguments; only its length becomes a constant."""
    return [start + i * step for i in range(-((start - stop) // step))]


def sorted_by_comparing(items: list) -> list:
    """`sorted`, by insertion."""
    result: list = []
    for item in items:
        at = len(result)
        while at > 0 and item < result[at - 1]:
            at -= 1
        result.insert(at, item)
    return result


def evenly_spaced(start: float, end: float, steps: int, *, dtype=None, device=None) -> torch.Tensor:
    """`torch.linspace`, from both ends to the middle as its kernels go; equal but for the last bit."""
    dtype = dtype or torch.get_default_dtype()
    if steps < 2:
        return torch.full((steps,), start, dtype=dtype, device=device)
    at = torch.arange(steps, dtype=torch.promote_types(dtype, torch.float32), device=device)
    step = (end - start) / (steps - 1)
    return torch.where(at < steps // 2, start + at * step, end - (steps - 1 - at) * step).to(dtype)


def contains(items: tuple, wanted: object) -> bool:
    """`wanted in items`; which item it is becomes a constant."""
    for item in items:  # noqa: SIM110  in plain steps, for Dynamo
        if item == wanted:
            return True
    return False


_TRACED_AS: dict[int, Callable] = {id(range): steps_of, id(sorted): sorted_by_comparing, id(torch.linspace): evenly_spaced}


def _traceable_call(translator: InstructionTranslatorBase, fn: VariableTracker, args: list, kwargs: dict) -> None:
    """In place of `InstructionTranslatorBase.call_function`, which every call in traced code goes through."""
    fn = fn.realize()
    traced = _TRACED_AS.get(id(getattr(fn, "fn", getattr(fn, "value", None))))
    if traced is not None and _accepts(traced, args, kwargs) and any(map(_may_vary, (*args, *kwargs.values()))):
        fn = VariableTracker.build(translator, traced)
    _call_function(translator, fn, args, kwargs)


def _traceable_contains(items: Iterable, search: VariableTracker, translator: InstructionTranslatorBase, *options) -> Any:
    """In place of `iter_contains` of torch/_dynamo/variables/lists.py."""
    found = list(items)
    if not search.is_python_constant() or not any(map(_may_vary, found)):
        return _iter_contains(found, search, translator, *options)
    return VariableTracker.build(translator, contains).call_function(translator, [TupleVariable(found), search], {})


def _accepts(function: Callable, args: list, kwargs: dict) -> bool:
    """Whether the call has no option that `function` lacks; the length of `range(length)` is a constant in any case."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _may_vary(value: VariableTracker) -> bool:
    """Whether it is a dynamic size, or a list of them."""
    value = value.realize()
    if isinstance(value, BaseListVariable):
        return any(map(_may_vary, value.items))
    return isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymInt)


# A class and a module are the process's. Dynamo traces on one thread at a time (`compile_lock`).
tracing_scope = SharedScope(
    {
        "call_function": (
            lambda: InstructionTranslatorBase.call_function,
            lambda value: setattr(InstructionTranslatorBase, "call_function", value),
        ),
        "iter_contains": (lambda: lists.iter_contains, lambda value: setattr(lists, "iter_contains", value)),
    }
)
TRACING: dict[str, Callable] = {"call_function": _traceable_call} if _call_function is not None else {}
if _iter_contains is not None:
    TRACING["iter_contains"] = _traceable_contains
