"""Classes that a model makes anew for each instance (Stable Cascade's LayerNorm2d), although they are the same.

Guards compare classes by identity, so every instance would need a graph of its own. While blocks run compiled, instances of
such twins have the class of the first of them.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import nn


def find_twins(model: nn.Module) -> list[tuple[nn.Module, type]]:
    """Modules whose class is made inside a function, and the class of the first module with the same code and closure."""
    first: dict[Hashable, type] = {}
    twins = []
    for module in model.modules():
        cls = type(module)
        if "<locals>" in cls.__qualname__:
            original = first.setdefault(_identity(cls), cls)
            if original is not cls:
                twins.append((module, original))
    return twins


@contextmanager
def one_class(twins: list[tuple[nn.Module, type]]) -> Iterator[None]:
    """While it lasts, each module has the class it is paired with."""
    own = [(module, type(module)) for module, _ in twins]
    try:
        for module, cls in twins:
            module.__class__ = cls
        yield
    finally:
        for module, cls in own:
            module.__class__ = cls


def _identity(cls: type) -> Hashable:
    members: list[tuple] = []
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            cells = tuple(id(cell.cell_contents) for cell in member.__closure__ or () if cell.cell_contents is not cls)
            members.append((name, member.__code__, cells, member.__defaults__ is None))
        elif not name.startswith("__"):
            members.append((name, id(member)))
    return cls.__module__, cls.__qualname__, cls.__bases__, tuple(members)
