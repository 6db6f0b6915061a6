"""Let Dynamo trace `in` over a list of numbers that may vary.

That a constant is in such a list (`1 in cond_or_uncond`) Dynamo denies before 2.15, without a word (pytorch#153366). While a
block of ours is traced, `contains` runs instead: the same result, from steps that Dynamo can follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..torch_compat import private

_iter_contains = private.iter_contains


def contains(items: tuple, wanted: object) -> bool:
    """`wanted in items`; which item it is becomes a constant."""
    for item in items:  # noqa: SIM110  in plain steps, for Dynamo
        if item == wanted:
            return True
    return False


def traceable_contains(items: Iterable, search: Any, translator: Any, *options) -> Any:
    """In place of `iter_contains` of torch/_dynamo/variables/lists.py."""
    found = list(items)
    if not search.is_python_constant() or not any(map(_may_vary, found)):
        return _iter_contains(found, search, translator, *options)
    variables = private.variables
    function = variables.VariableTracker.build(translator, contains)
    return function.call_function(translator, [variables.TupleVariable(found), search], {})


def _may_vary(value: Any) -> bool:
    """Whether it is a dynamic size, or a list of them."""
    value = value.realize()
    if isinstance(value, private.variables.BaseListVariable):
        return any(map(_may_vary, value.items))
    return isinstance(value, private.variables.SymNodeVariable) and isinstance(value.sym_num, torch.SymInt)
