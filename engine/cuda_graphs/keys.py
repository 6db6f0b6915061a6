"""Key what a CUDA graph depends on beside tensors: equal only for what a call cannot tell apart.

`repr` will not do: of most objects it is an address, which another object may have later, or it leaves out what is in them.

Other nodes set plain attributes of layers (the `strength` of another pack's layer, `params.theta`) between runs, and between
calls, so `HeldValues` looks at them before each call: the 2,000 modules of SDXL in 0.7 ms. What a module holds is listed once;
then its values are fetched at once and told apart by `id`.
"""

import enum
import functools
import operator
import types
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..ownership import contents_of
from ..per_model import Same
from ..torch_settings import original

# Immutable, and `repr` says all of it (also the sign of a zero, which `==` does not see).
_PLAIN = {type(None), type(...), bool, int, float, complex, str, bytes, range, uuid.UUID}
_PLAIN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_CONTAINERS = {tuple, list, torch.Size}
_UNCHANGING = (enum.Enum, type, types.ModuleType, types.BuiltinFunctionType)


class NoKey(Exception):
    """The state of an object cannot be compared with an earlier one; the message names its class."""


def value_key(value: object, inputs: bool = False) -> Hashable:
    """A key by value of numbers, strings, dtypes, containers of them and functions.

    The key of a function is its identity, what its closure and defaults hold, and the identity of what its code names in its
    Python module.

    Args:
        inputs: tensors in lists, tuples and dicts are inputs of the graph: all but their data counts.

    Raises:
        NoKey: `value` holds another object, which could change in place or be replaced at the same address.
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
        named = (Same(original(value.__globals__.get(name))) for name in value.__code__.co_names)
        return Same(value), *named, *(_key(held, False, above) for held in _held_by(value) if id(held) not in above)
    raise NoKey(f"an object of the class {cls.__name__}")


def _held_by(function: types.FunctionType) -> Iterator[object]:
    if function.__globals__.get("__name__", "").partition(".")[0] == "torch":  # wrapped by torch.compiler.disable or similar
        yield function.__dict__.get("__wrapped__")
        return
    yield from (function.__defaults__, function.__kwdefaults__, vars(function), *contents_of(function))


_HELD_PLAIN = {bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device}
_HELD_CONTAINERS = {list, dict, set}
_NOT_OPENED = (nn.Module, torch.Tensor, type, types.ModuleType)
# A longer tuple, list or dict is no setting.
_LONGEST = 64
# Containers that are searched for tensors, and how deep.
_OPENED = {tuple, list, dict}
_DEEPEST = 3
# Weights, buffers, and tables of PyTorch's own.
_OF_MODULES = frozenset(vars(nn.Module()))
# Attributes of the host under dynamic VRAM: LoRA for weights on their way into pages, the pages, whose addresses stay, and
# memory for their transfers.
OF_THE_HOST = {
    "weight_lowvram_function",
    "bias_lowvram_function",
    "_v_weight",
    "_v_bias",
    "_v_signature",
    "_pin_state",
    "_pins",
}


class _Key:
    """A tuple whose hash is computed once, since a key is looked up several times a call."""

    def __init__(self, *parts: Hashable):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._parts == other._parts)


class HeldValues:
    """The public plain attributes of modules and of plain objects among their attributes, and the tensors among all of their
    attributes; keeps none of the owners alive.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()):
        self._owners = [weakref.ref(module) for module in modules]
        self._listed: list[tuple[weakref.ref, int, Callable]] | None = None
        self._opened: list[tuple[weakref.ref, str, weakref.ref]] = []
        self._names: list[tuple[str, ...]] = []
        self._containers: list[tuple[weakref.ref, str]] = []
        self._tensors: list[tuple[weakref.ref, str]] = []
        self._values: list = []
        self._ids: list[int] = []
        self._elements: list[Hashable] = []
        self._contents: list[Hashable] = []
        self._key = _Key()

    def are_of(self, modules: list[nn.Module]) -> bool:
        return len(modules) == len(self._owners) and all(
            owner() is module for owner, module in zip(self._owners, modules, strict=True)
        )

    def key(self) -> Hashable:
        """The same object as at the last call, if nothing has changed."""
        values = self._fetch()
        if values is None:
            self._list()
            values = self._fetch() or []
        ids, contents = [*map(id, values)], [self._content(*place) for place in self._containers]
        contents += [tuple(_tensor_keys(owner().__dict__.get(name))) for owner, name in self._tensors]
        if ids == self._ids and contents == self._contents:
            return self._key
        changed = [i for i, (now, before) in enumerate(zip(ids, self._ids, strict=False)) if now != before]
        elements = [*self._elements, *map(_element, values[len(self._elements) :])]
        for i in changed:
            elements[i] = _element(values[i])
        # Kept, as an `id` says nothing of a value that is gone.
        self._values = [value if type(value) in _HELD_PLAIN else None for value in values]
        self._ids = ids
        if elements != self._elements or contents != self._contents:
            self._elements, self._contents = elements, contents
            self._key = _Key(tuple(self._names), tuple(elements), tuple(contents))
        return self._key

    def _fetch(self) -> list | None:
        """All values; None if an attribute was added or removed."""
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
        except (AttributeError, KeyError):  # the object was freed, or an attribute replaced by another
            return None
        return values

    def _list(self) -> None:
        self._listed, self._names, self._containers, self._tensors = [], [], [], []
        self._values, self._ids, self._elements, self._contents = [], [], [], []
        modules = [module for owner in self._owners if (module := owner()) is not None]
        self._opened = [
            (weakref.ref(module), name, weakref.ref(value))
            for module in modules
            for name, value in vars(module).items()
            if name[0] != "_" and name not in OF_THE_HOST and _is_plain_object(value)
        ]
        for owner in (*modules, *(value for *_, opened in self._opened if (value := opened()) is not None)):
            entries, reference = vars(owner), weakref.ref(owner)
            # Sorted: the host removes attributes of a layer and puts them back.
            public = sorted(name for name in entries.keys() - OF_THE_HOST if not name.startswith("_"))
            names = tuple(name for name in public if type(entries[name]) in _HELD_PLAIN)
            if names:
                self._listed.append((reference, len(entries), operator.itemgetter(*names, names[0])))
                self._names.append(names)
            for name in public:
                value = entries[name]
                if type(value) in _HELD_CONTAINERS and 0 < len(value) <= _LONGEST and _key_or_class(value) is not type(value):
                    self._containers.append((reference, name))
            for name in sorted(entries.keys() - _OF_MODULES - OF_THE_HOST):
                value = entries[name]
                if isinstance(value, torch.Tensor) or (type(value) in _OPENED and _may_hold_tensors(value)):
                    self._tensors.append((reference, name))

    @staticmethod
    def _content(owner: weakref.ref, name: str) -> Hashable:
        return _key_or_class(getattr(owner(), name, None))


def _may_hold_tensors(container: Any) -> bool:
    """Whether it holds tensors, or is a dict that is still empty: a cache."""
    try:
        keys = [*_tensor_keys(container)]
    except NoKey:
        return True
    return container == {} or any(type(key) is tuple and len(key) > 2 for key in keys)


def _tensor_keys(value: Any, depth: int = 0) -> Iterator[Hashable]:
    """What a graph depends on in a tensor, or in a container of tensors: the address; the data, where a graph holds a copy.

    A replay reads the data of other tensors anew.
    """
    cls = type(value)
    if isinstance(value, torch.Tensor):
        if cls not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            yield Same(value), None, None
        else:
            # PyTorch passes a number on the CPU to kernels by value.
            number = repr(value.item()) if value.ndim == 0 and value.device.type == "cpu" else None
            yield value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, number
    elif cls in _OPENED:
        if depth > _DEEPEST or len(value) > _LONGEST:
            if any(isinstance(item, torch.Tensor) for item in (value.values() if cls is dict else value)):
                raise NoKey(f"a long or deep {cls.__name__} of tensors")
            return
        yield len(value)
        for name, item in value.items() if cls is dict else enumerate(value):
            yield repr(name) if type(name) in _HELD_PLAIN else Same(name)
            yield from _tensor_keys(item, depth + 1)
    else:
        yield cls, repr(value) if cls in _HELD_PLAIN else None


def _is_plain_object(value: object) -> bool:
    if isinstance(value, _NOT_OPENED) or type(value).__module__ == "builtins":
        return False
    return bool(getattr(value, "__dict__", None)) and getattr(type(value), "__weakrefoffset__", 0) != 0


def _element(value: object) -> Hashable:
    """The `repr` of a number, which has the sign of a zero; the class of a value that is no longer plain."""
    cls = type(value)
    return (cls, repr(value)) if cls in _HELD_PLAIN and cls is not tuple else _key_or_class(value)


def _key_or_class(value: object) -> Any:
    try:
        return value_key(value)
    except NoKey:
        return type(value)
