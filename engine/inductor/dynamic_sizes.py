"""Let Dynamo trace `range`, `sorted` and `torch.linspace` over sizes that may vary.

It makes the arguments of `range` and `linspace` constants, which is a graph for each size (a block that works in chunks), and
cannot sort what is no constant, which is a graph break (slices of tokens). While a block of ours is traced, such a call runs a
function below instead: the same result, from steps that Dynamo can follow. The graph then depends on how often a loop runs and
which size is the larger, no more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

try:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import BaseListVariable, SymNodeVariable, VariableTracker

    _call_function = InstructionTranslatorBase.call_function
except (ImportError, AttributeError):  # another PyTorch: those blocks take a graph for each size, or a break
    _call_function = None

from ..torch_settings import SharedScope


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


_TRACED_AS: dict[int, Callable] = {id(range): steps_of, id(sorted): sorted_by_comparing, id(torch.linspace): evenly_spaced}


def _traceable_call(translator: InstructionTranslatorBase, fn: VariableTracker, args: list, kwargs: dict) -> None:
    """In place of `InstructionTranslatorBase.call_function`, which every call in traced code goes through."""
    fn = fn.realize()
    traced = _TRACED_AS.get(id(getattr(fn, "fn", getattr(fn, "value", None))))
    if traced is not None and _accepts(traced, args, kwargs) and any(map(_may_vary, (*args, *kwargs.values()))):
        fn = VariableTracker.build(translator, traced)
    _call_function(translator, fn, args, kwargs)


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


# A class is the process's. Dynamo traces on one thread at a time (`compile_lock`).
tracing_scope = SharedScope(
    {
        "call_function": (
            lambda: InstructionTranslatorBase.call_function,
            lambda value: setattr(InstructionTranslatorBase, "call_function", value),
        )
    }
)
TRACING = {"call_function": _traceable_call} if _call_function is not None else {}
