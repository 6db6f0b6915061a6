"""Key the plain values that layers hold as attributes, such as the `strength` of another pack's layer or `params.theta`.

Other nodes set them between runs, also between two calls, so they are looked at before each call: the 2,000 modules of SDXL
in 0.7 ms. What a module holds is listed once; then its values are fetched at once and told apart by `id`.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from .keys import NoKey, value_key

_PLAIN = {bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device}
_CONTAINERS = {list, dict, set}
_NOT_OPENED = (nn.Module, torch.Tensor, type, types.ModuleType)
# A longer tuple, list or dict is no setting.
_LONGEST = 64
# What the host keeps on layers under dynamic VRAM: LoRA for weights on their way into pages, which keep their place.
_OF_THE_HOST = {"weight_lowvram_function", "bias_lowvram_function"}


class _Key:
    """Equal by value; the hash is computed once, since a key is looked up several times a call."""

    def __init__(self, *parts: Hashable):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._parts == other._parts)


class HeldValues:
    """The public plain attributes of modules, and those of plain objects among their attributes; keeps neither alive.

    Args:
        modules: whose attributes are looked at.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()):
        self._owners = [weakref.ref(module) for module in modules]
        self._listed: list[tuple[weakref.ref, int, Callable]] | None = None
        self._opened: list[tuple[weakref.ref, str, weakref.ref]] = []
        self._names: list[tuple[str, ...]] = []
        self._containers: list[tuple[weakref.ref, str]] = []
        self._values: list = []
        self._ids: list[int] = []
        self._elements: list[Hashable] = []
        self._contents: list[Hashable] = []
        self._key = _Key()

    def are_of(self, modules: list[nn.Module]) -> bool:
        """Whether it looks at these modules."""
        return len(modules) == len(self._owners) and all(
            owner() is module for owner, module in zip(self._owners, modules, strict=True)
        )

    def key(self) -> Hashable:
        """The same object as the last time, if nothing has changed."""
        values = self._fetch()
        if values is None:
            self._list()
            values = self._fetch() or []
        ids, contents = [*map(id, values)], [self._content(*place) for place in self._containers]
        if ids == self._ids and contents == self._contents:
            return self._key
        changed = [i for i, (now, before) in enumerate(zip(ids, self._ids, strict=False)) if now != before]
        elements = [*self._elements, *map(_element, values[len(self._elements) :])]
        for i in changed:
            elements[i] = _element(values[i])
        # Kept, as an `id` says nothing of a value that is gone.
        self._values = [value if type(value) in _PLAIN else None for value in values]
        self._ids = ids
        if elements != self._elements or contents != self._contents:
            self._elements, self._contents = elements, contents
            self._key = _Key(tuple(self._names), tuple(elements), tuple(contents))
        return self._key

    def _fetch(self) -> list | None:
        """All values; None where something holds more or less than was listed."""
        if self._listed is None:
            return None
        values: list = []
        try:
            if any(owner().__dict__[name] is not opened() for owner, name, opened in self._opened):
                return None
            for owner, size, get in self._listed:
                entries = owner().__dict__
                if len(entries) != size:
                    return None
                values += get(entries)
        except (AttributeError, KeyError):  # it is gone, or has another attribute instead
            return None
        return values

    def _list(self) -> None:
        self._listed, self._names, self._containers = [], [], []
        self._values, self._ids, self._elements, self._contents = [], [], [], []
        modules = [module for owner in self._owners if (module := owner()) is not None]
        self._opened = [
            (weakref.ref(module), name, weakref.ref(value))
            for module in modules
            for name, value in vars(module).items()
            if name[0] != "_" and _is_plain_object(value)
        ]
        for owner in (*modules, *(value for *_, opened in self._opened if (value := opened()) is not None)):
            entries, reference = vars(owner), weakref.ref(owner)
            # In one order: the host takes some away from a layer and puts them back.
            public = sorted(name for name in entries.keys() - _OF_THE_HOST if not name.startswith("_"))
            names = tuple(name for name in public if type(entries[name]) in _PLAIN)
            if names:
                self._listed.append((reference, len(entries), operator.itemgetter(*names, names[0])))
                self._names.append(names)
            for name in public:
                value = entries[name]
                if type(value) in _CONTAINERS and 0 < len(value) <= _LONGEST and _key_or_class(value) is not type(value):
                    self._containers.append((reference, name))

    @staticmethod
    def _content(owner: weakref.ref, name: str) -> Hashable:
        return _key_or_class(getattr(owner(), name, None))


def _is_plain_object(value: object) -> bool:
    if isinstance(value, _NOT_OPENED) or callable(value) or type(value).__module__ == "builtins":
        return False
    return bool(getattr(value, "__dict__", None)) and getattr(type(value), "__weakrefoffset__", 0) != 0


def _element(value: object) -> Hashable:
    """Of a number its text, which tells the sign of a zero; of what is not plain any more its class."""
    cls = type(value)
    return (cls, repr(value)) if cls in _PLAIN and cls is not tuple else _key_or_class(value)


def _key_or_class(value: object) -> Any:
    try:
        return value_key(value)
    except NoKey:
        return type(value)
