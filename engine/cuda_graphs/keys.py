"""Keys for what a CUDA graph depends on beside tensors: equal only for what a call cannot tell apart.

`repr` will not do: of most objects it is an address, which another object may have later, or it leaves out what is in them.
"""

from __future__ import annotations

import enum
import functools
import types
import uuid
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from ..closures import contents_of
from ..identity import Same

# Immutable, and `repr` says all of it (also the sign of a zero, which `==` does not see).
_PLAIN = {type(None), type(...), bool, int, float, complex, str, bytes, range, uuid.UUID}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_CONTAINERS = {tuple, list, torch.Size}
_UNCHANGING = (enum.Enum, type, types.ModuleType, types.BuiltinFunctionType)


class NoKey(Exception):
    """An object whose state cannot be compared with what it was; the message names its class."""


def value_key(value: object, inputs: bool = False) -> Hashable:
    """A key by value, of numbers, texts, dtypes, containers of them and functions.

    A function is known by its identity, and by what its closure and its defaults hold now; the module in which it is written
    is not looked at.

    Args:
        inputs: tensors in lists, tuples and dicts are inputs of the graph, of which all but the data counts.

    Raises:
        NoKey: there is something else in it, which could change in place or be made anew at the same address.
    """
    return _key(value, inputs, ())


def _key(value: Any, inputs: bool, above: tuple[int, ...]) -> Hashable:
    cls = type(value)
    if cls in _PLAIN:
        return cls, repr(value)
    if inputs and cls in (torch.Tensor, torch.nn.Parameter):
        return cls, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _UNCHANGING) or hasattr(cls, "__members__"):  # an enumeration, of pybind11 too
        return Same(value)
    if id(value) in above:
        raise NoKey(f"a {cls.__name__} that is part of itself")
    above = (*above, id(value))
    if cls in _CONTAINERS:
        return cls, tuple(_key(item, inputs, above) for item in value)
    if cls is dict:
        return cls, tuple((_key(name, False, above), _key(item, inputs, above)) for name, item in value.items())
    if cls in (set, frozenset):
        return cls, frozenset(_key(item, False, above) for item in value)
    if cls is functools.partial:
        return cls, _key((value.func, value.args, value.keywords), False, above)
    if cls is types.FunctionType:
        return Same(value), *(_key(held, False, above) for held in _held_by(value) if id(held) not in above)
    raise NoKey(f"an object of the class {cls.__name__}")


def _held_by(function: types.FunctionType) -> Iterator[object]:
    """What a function brings along."""
    if function.__globals__.get("__name__", "").partition(".")[0] == "torch":  # torch.compiler.disable and its like
        yield function.__dict__.get("__wrapped__")
        return
    yield from (function.__defaults__, function.__kwdefaults__, vars(function), *contents_of(function))
