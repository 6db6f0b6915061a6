"""Notice methods that somebody replaces on a class.

PyTorch guards the class of a module, its class attributes and static methods, but no method: compiled code would keep calling
the one that it was traced with.
"""

from __future__ import annotations

import types
import weakref

from torch import nn

from .duplicate_classes import class_key, functions_in

# Nobody traces what is in these.
_COMMON = (nn.Module, object)


class Methods:
    """The methods of a class and of its bases at one time; keeps neither class nor methods alive.

    `key`: equal for the same methods of the same class, and of its twins (`duplicate_classes.py`), at another time.
    """

    def __init__(self, cls: type):
        self._freed: list[weakref.ref] = []
        functions = _functions(cls)
        self._ids = [*map(id, functions)]
        self._alive = [weakref.ref(function, self._freed.append) for function in functions]
        self.key = tuple(class_key(base) for base in cls.__mro__ if base not in _COMMON)

    def are_those_of(self, cls: type) -> bool:
        """Whether none has been replaced since; an `id` is as good as the function while that is alive."""
        return not self._freed and [*map(id, _functions(cls))] == self._ids


class MethodsNow(dict[type, Methods]):
    """The methods of each class it is asked for: the object of the last time where they are the same."""

    def __missing__(self, cls: type) -> Methods:
        methods = _known.get(cls)
        if methods is None or not methods.are_those_of(cls):
            methods = _known[cls] = Methods(cls)
        self[cls] = methods
        return methods


_known: weakref.WeakKeyDictionary[type, Methods] = weakref.WeakKeyDictionary()


def _functions(cls: type) -> list[types.FunctionType]:
    return [function for base in cls.__mro__ if base not in _COMMON for function in functions_in(base)]
