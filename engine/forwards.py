"""Tell what a module runs: the `forward` in its `__dict__`, and what closures hold."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class OwnForward(functools.partial):
    """A forward of ours that stays in a block; for whom asks who has replaced a forward it is not there."""


def is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """Whether a method in the module's `__dict__` is what the class has under that name anyway.

    The host leaves it there when it takes another one back (weight_adapter/bypass.py, object patches).
    """
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)


def forward_of_class(cls: type) -> object | None:
    """As it stands in the class: asking a class of `torch.jit` for its forward is an error."""
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


def given_forward(module: nn.Module) -> object | None:
    """The one that somebody has given this module, if it is another than its class's."""
    found = module.__dict__.get("forward")
    return None if found is None or isinstance(found, OwnForward) or is_of_class(module, "forward", found) else found


@contextmanager
def exchanged(forwards: Mapping[nn.Module, Callable], name: str = "forward") -> Iterator[None]:
    """While it lasts, these modules have these forwards; all is put back at the end, also after an error."""
    before = {module: module.__dict__.get(name) for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__[name] = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = forward


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable has been set."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def contents_of(function: types.FunctionType) -> list[object]:
    """The values of the variables that have been set."""
    return [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
