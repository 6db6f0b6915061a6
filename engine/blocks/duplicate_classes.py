"""Classes that a model makes anew for each instance (Stable Cascade's LayerNorm2d), although they are the same.

Guards compare classes by identity, so every instance would need a graph of its own. While blocks run compiled, instances of
such twins have the class of the first of them.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn

from ..closures import contents_of
from ..identity import Same


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
