"""Make keys of all that a call depends on except tensor data. The host's code cannot tell calls of equal keys apart."""

import enum
import functools
import types
from collections.abc import Hashable
from typing import Any

import torch

from ..ownership import PLAIN, is_ours
from ..per_model import Same


class NoKey(Exception):
    """The state of an object cannot be compared with an earlier state; the message names the class."""


def value_key(value: Any, inputs: bool = False) -> Hashable:
    """A key by value of numbers, strings, dtypes and containers of them, by identity of functions and classes.

    `inputs`: whether to accept tensors in lists, tuples and dicts, as inputs of the graph, by all properties but their data.
    NoKey if `value` holds any other object, which could change in place or be replaced at the same address.
    """
    cls = type(value)
    if cls in PLAIN:
        return cls, repr(value)
    if inputs and cls in (torch.Tensor, torch.nn.Parameter):
        return cls, value.shape, value.stride(), value.dtype, value.device
    if cls in (tuple, list, torch.Size):
        return cls, tuple(value_key(item, inputs) for item in value)
    if cls is dict:
        return cls, tuple((value_key(name), value_key(item, inputs)) for name, item in value.items())
    if cls in (set, frozenset):
        return cls, frozenset(map(value_key, value))
    if cls is functools.partial:
        return cls, value_key((value.func, value.args, value.keywords))
    # Enumerations of pybind11 are not `enum.Enum`. What a function closes over may change, unless the function is ours.
    is_plain_function = cls is types.FunctionType and (not value.__closure__ or is_ours(value))
    if is_plain_function or isinstance(value, enum.Enum | type | types.BuiltinFunctionType) or hasattr(cls, "__members__"):
        return Same(value)
    raise NoKey(f"an object of the class {cls.__name__}")
