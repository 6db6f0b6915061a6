"""Tell whether a function among a block's arguments holds an object, such as a cache that it fills.

Qwen-Image 2.1 passes each block its attention as a closure; in the first step the closure puts keys and values of the text into
a cache, under the block's number. Compiled, each block would need a graph of its own. That step runs once, on the tokens of the
text alone, and stays eager.
"""

import functools
import types
from collections.abc import Mapping

import torch
from torch import nn

from ..ownership import contents_of, is_library

_FUNCTION = types.FunctionType | types.MethodType | functools.partial
# Not searched, since guards cover what the block reads of these.
_GUARDED = torch.Tensor | nn.Module | Mapping | type | types.ModuleType


def is_given_an_object(args: tuple, kwargs: dict) -> bool:
    """Whether an argument is a function that holds an object whose class is from no library (`is_library`)."""
    return any(_holds_object(value) for value in (*args, *kwargs.values()) if isinstance(value, _FUNCTION))


def _holds_object(value: object, depth: int = 4) -> bool:
    if isinstance(value, _GUARDED):
        return False
    if isinstance(value, types.FunctionType):
        inside = contents_of(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        return not is_library(type(value).__module__)
    return depth > 0 and any(_holds_object(part, depth - 1) for part in inside)
