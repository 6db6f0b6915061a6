"""Keep values for each model, and key objects by identity, without keeping either alive."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from torch import nn

T = TypeVar("T")


class PerModel(Generic[T]):
    """One value for each module, freed with it; `make` is called with the module and must not return a reference to it."""

    def __init__(self, make: Callable[[nn.Module], T]):
        self._make = make
        self._values: weakref.WeakKeyDictionary[nn.Module, T] = weakref.WeakKeyDictionary()

    def __call__(self, model: nn.Module) -> T:
        value = self._values.get(model)
        if value is None:
            value = self._values[model] = self._make(model)
        return value

    def items(self) -> list[tuple[nn.Module, T]]:
        models = [ref() for ref in self._values.keyrefs()]  # a list first: other threads add models meanwhile
        pairs = [(model, self._values.get(model)) for model in models if model is not None]
        return [(model, value) for model, value in pairs if value is not None]


class SameObjects:
    """A list of objects by identity; keeps only objects alive that do not support weak references."""

    def __init__(self, objects: Iterable[object]):
        objects = list(objects)
        self._ids = [*map(id, objects)]
        self._freed: list[weakref.ref] = []
        self._alive = [self._reference(value) for value in objects]

    def _reference(self, value: object) -> object:
        try:
            return weakref.ref(value, self._freed.append)
        except TypeError:
            return value

    def are(self, objects: Iterable[object]) -> bool:
        """Whether these are the same objects; while an object is alive, its `id` is unique."""
        return not self._freed and [*map(id, objects)] == self._ids


class Same:
    """A key by identity: an object that has the same address later is not equal. Keeps the object alive only if it does
    not support weak references."""

    __slots__ = ("_alive", "_hash", "_value")

    def __init__(self, value: object):
        self._hash = id(value)
        self._value: object | None = None
        try:
            self._alive: weakref.ref | None = weakref.ref(value)
        except TypeError:  # a built-in type without weak references
            self._alive, self._value = None, value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        if self._alive is None or other._alive is None:
            return self._alive is other._alive and self._value is other._value
        value = self._alive()
        return value is not None and value is other._alive()


class Key:
    """A key whose hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: Hashable):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self._hash == other._hash and self._parts == other._parts)
