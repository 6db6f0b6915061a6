"""Keys by identity."""

from __future__ import annotations

import weakref


class Same:
    """Equal for one and the same object, for no other that has its address later. Does not keep it alive, if that can be."""

    __slots__ = ("_alive", "_hash", "_value")

    def __init__(self, value: object):
        self._hash = id(value)
        self._value: object | None = None
        try:
            self._alive: weakref.ref | None = weakref.ref(value)
        except TypeError:  # built in
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
