"""Tell whether a function among a block's arguments changes an object that it holds."""

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..ownership import contents_of

# The types of functions that may hold an object which changes, such as a cache. Qwen-Image 2.1 passes each block its attention
# as a closure; in the first step the closure puts keys and values of the text into a cache, under the block's number. Compiled,
# each block would need a graph of its own. That step runs once, on the tokens of the text alone, and stays eager.
_FUNCTION = types.FunctionType | types.MethodType | functools.partial
_SEQUENCE = list | tuple | set | frozenset
# Not searched, since guards cover what the block reads of these.
_PLAIN = torch.Tensor | nn.Module | Mapping | type | types.ModuleType
_LIBRARIES = {"torch", *sys.stdlib_module_names}
_STORES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_ATTR", "DELETE_SUBSCR"}
_CHANGERS = {"append", "appendleft", "extend", "insert", "update", "setdefault", "add", "pop", "popitem", "remove", "clear"}
# Special methods that are looked at. Python itself calls the others, which unchanging objects have too (frozen dataclasses).
_SPECIAL = {"__call__", "__setitem__", "__delitem__"}

_changing: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def changes_an_object(args: tuple, kwargs: dict) -> bool:
    """Whether one of the arguments is a function that holds an object whose own methods change it."""
    return any(_holds_changing(value) for value in (*args, *kwargs.values()) if isinstance(value, _FUNCTION))


def _holds_changing(value: object, depth: int = 4) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, types.FunctionType):
        inside = contents_of(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, _SEQUENCE):
        inside = list(value)
    else:
        return _is_changing(type(value))
    return depth > 0 and any(_holds_changing(part, depth - 1) for part in inside)


def _is_changing(cls: type) -> bool:
    if cls not in _changing:
        _changing[cls] = any(_stores(method.__code__) for method in _methods(cls))
    return _changing[cls]


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            named = (m for name, m in vars(base).items() if not name.startswith("__") or name in _SPECIAL)
            yield from (method for method in named if isinstance(method, types.FunctionType))


def _stores(code: types.CodeType) -> bool:
    """Whether the code sets attributes or elements, or calls what changes a container."""
    return not _CHANGERS.isdisjoint(code.co_names) or any(i.opname in _STORES for i in dis.get_instructions(code))
