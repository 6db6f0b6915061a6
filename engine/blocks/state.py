"""Tell whether a block still is what it was: its modules, their methods, forwards and hooks.

Other nodes exchange layers inside blocks, give them another class (RES4LYF) or another `forward` (LoRA in bypass mode,
KJNodes' attention for Wan), replace methods of a class or hook into layers, before or after a block was compiled. PyTorch
guards the class of a module, its class attributes and static methods, but no method: compiled code would keep calling the one
that was traced.

Guards compare classes by identity. Some models make a class anew for each instance (Stable Cascade's LayerNorm2d), each of
which would need a graph of its own: while blocks run compiled, instances of such twins have the class of the first of them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from torch import nn

from ..forwards import contents_of, given_forward
from ..per_model import Same


class Twin(NamedTuple):
    """A module, the class made for it, and the class of the first module of this kind."""

    module: nn.Module
    cls: type
    original: type


def find_twins(model: nn.Module) -> list[Twin]:
    """Modules whose class is made inside a function, where another one before them has the same code and closure."""
    first: dict[Hashable, type] = {}
    twins = []
    for module in model.modules():
        cls = type(module)
        if "<locals>" in cls.__qualname__:
            original = first.setdefault(class_key(cls), cls)
            if original is not cls:
                twins.append(Twin(module, cls, original))
    return twins


@contextmanager
def one_class(twins: list[Twin]) -> Iterator[None]:
    """While it lasts, each module has the class of the first; those that somebody has given another one keep that."""
    unchanged = [twin for twin in twins if type(twin.module) is twin.cls]
    try:
        for twin in unchanged:
            twin.module.__class__ = twin.original
        yield
    finally:
        for twin in unchanged:
            twin.module.__class__ = twin.cls


def class_key(cls: type) -> Hashable:
    """Equal for a class and its twins, as long as their methods are the same; what the bases have is not looked at."""
    if "<locals>" not in cls.__qualname__:
        return Same(cls), *map(Same, functions_in(cls))
    members: list[tuple] = []
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            cells = tuple(Same(value) for value in contents_of(member) if value is not cls)
            members.append((name, member.__code__, cells, member.__defaults__ is None))
        elif not name.startswith("__"):
            members.append((name, Same(member)))
    return cls.__module__, cls.__qualname__, cls.__bases__, tuple(members)


def functions_in(cls: type) -> list[types.FunctionType]:
    return [member for member in cls.__dict__.values() if member.__class__ is types.FunctionType]


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


Code = types.CodeType | type
T = TypeVar("T")


class BlockState(Generic[T]):
    """The modules inside a block, as they were when it was last looked at; keeps none of them alive.

    Args:
        block: what is compiled; its own given `forward` and hooks are outside of that and do not count.
        now: shared by all that is looked at in one call of a model.

    `groups`: what it runs, by settings. `methods`: those of each class in it, its own class first.
    """

    def __init__(self, block: nn.Module, now: MethodsNow):
        self.groups: dict[tuple, T] = {}
        self.forwards: tuple[tuple[str, Code], ...] = ()
        self.hooked: tuple[str, ...] = ()
        self._freed: list[weakref.ref] = []
        self._alive = []
        for path, module in block.named_modules():
            self._alive.append(weakref.ref(module, self._freed.append))
            if module is block:
                continue
            code = _given_code(module)
            if code is not None:
                self.forwards += ((path, code),)
            if _is_hooked(module):
                self.hooked += (path,)
        self._found = _look_at(block, now)
        self.methods = tuple(methods.key for methods in dict.fromkeys(self._found[1]))

    def holds(self, block: nn.Module, now: MethodsNow) -> bool:
        """Whether nothing in the block has changed since; asked for each block before each call of the model."""
        return not self._freed and _look_at(block, now) == self._found


def _look_at(block: nn.Module, now: MethodsNow) -> tuple[list[int], list[Methods], list[tuple]]:
    """The modules in a block by `id`, the methods of their classes, and what runs something else than its class's forward.

    An `id` is as good as the module while that is alive. Plain dicts and a loop: for SDXL this looks at 2,000 modules a step.
    """
    ids, methods, special = [], [now[block.__class__]], []
    waiting = [*block._modules.values()]
    while waiting:
        module = waiting.pop()
        ids.append(id(module))
        if module is None:
            continue
        methods.append(now[module.__class__])
        entries = module.__dict__
        if entries["_modules"]:
            waiting.extend(entries["_modules"].values())
        if "forward" in entries or entries["_forward_hooks"] or entries["_forward_pre_hooks"]:
            code, hooked = _given_code(module), _is_hooked(module)
            if code is not None or hooked:
                special.append((len(ids), code, hooked))
    return ids, methods, special


def _given_code(module: nn.Module) -> Code | None:
    """The code of a `forward` that somebody has given this one module, or the class of that callable; else None.

    The class's own in the module's dict changes nothing except for guards, so it is removed.
    """
    if "forward" not in module.__dict__:
        return None
    found = given_forward(module)
    if found is None:
        del module.__dict__["forward"]
        return None
    function = getattr(found, "__func__", found)
    return function.__code__ if isinstance(function, types.FunctionType) else type(found)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
