"""Look into closures, and find the code that a callable may call."""

from __future__ import annotations

import functools
import types

from torch import nn

# Enough for patches in patches; what hangs on a whole application is not followed to its end.
MOST_CALLEES = 100


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable has been set."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def contents_of(function: types.FunctionType) -> list[object]:
    """The values of the variables that have been set."""
    return [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]


def codes_behind(function: object) -> tuple[types.CodeType | type, ...]:
    """The code of a callable, and then of all callables that it holds: in its closure, as a partial's arguments, on its `self`.

    Of an object that is called, its class. A module is not looked into.
    """
    codes: dict[types.CodeType | type, None] = {}
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        callee = waiting.pop()
        if id(callee) in seen or len(seen) > MOST_CALLEES:
            continue
        seen.add(id(callee))
        if isinstance(callee, types.FunctionType):
            codes[callee.__code__] = None
            waiting += contents_of(callee)
        elif isinstance(callee, types.MethodType):
            waiting += [callee.__func__, *_callables_of(callee.__self__)]
        elif isinstance(callee, functools.partial):
            waiting += [callee.func, *callee.args, *callee.keywords.values()]
        elif callable(callee) and not isinstance(callee, type | nn.Module | types.BuiltinFunctionType):
            codes[type(callee)] = None
            waiting += [vars(type(callee)).get("__call__"), *_callables_of(callee)]
    return tuple(codes)


def _callables_of(owner: object) -> list[object]:
    entries = () if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values()
    return [value for value in entries if callable(value)]
