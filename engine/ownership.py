"""Tell whose code a module runs: the `forward` in its `__dict__`, and what closures hold."""

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn


class OwnForward(functools.partial):
    """A forward of ours that stays in a block; `given_forward` ignores it."""


def is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """Whether `value`, from the module's `__dict__`, is the class's own method of that name.

    The host leaves such a method there when it takes back a patch (weight_adapter/bypass.py, object patches).
    """
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def callables_of(module: nn.Module) -> list[tuple[str, object]]:
    """Attributes beside `forward` that the module's code may call: (name, value); None where something may be put later."""
    return [
        (name, value)
        for name, value in [*vars(module).items()]
        if (value is None or callable(value)) and name != "forward" and name not in _OF_EVERY_MODULE
    ]


def forward_of_class(cls: type) -> object | None:
    """As it stands in the class: asking a class of `torch.jit` for its forward is an error."""
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


def given_forward(module: nn.Module) -> object | None:
    """The forward that another node has put over that of the module's class, or None."""
    forward = module.__dict__.get("forward")
    ours = forward is None or isinstance(forward, OwnForward) or is_of_class(module, "forward", forward)
    return None if ours else forward


TORCH_COMPILE = "torch.compile"


def named_origin(function: Any) -> str:
    """A function of another node, by its name and the pack or file that it is from; empty for None."""
    if function is None:
        return ""
    if hasattr(function, "_torchdynamo_orig_callable"):  # another node compiles; PyTorch does not tell which
        return TORCH_COMPILE
    function = getattr(function, "func", function)  # of functools.partial
    named = function if hasattr(function, "__qualname__") else type(function)
    name, place = named.__qualname__.rpartition("<locals>.")[2], named.__module__ or "?"  # None: made by `exec`
    parts = Path(getattr(sys.modules.get(place), "__file__", None) or place).parts
    pack = parts[parts.index("custom_nodes") + 1] if "custom_nodes" in parts[:-1] else parts[-1]
    return f"{name} ({pack})"


@contextmanager
def exchanged(forwards: Mapping[nn.Module, Callable], name: str = "forward") -> Iterator[None]:
    """While it lasts, these modules have these forwards.

    A forward that somebody else has put in the place of one of these stays there. It may go on calling this one, which
    afterwards must do what the class's does.
    """
    before = {module: module.__dict__.get(name) for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__[name] = forward
        yield
    finally:
        for module, forward in before.items():
            if module.__dict__.get(name) is not forwards[module]:
                continue
            if forward is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = forward


def contents_of(function: types.FunctionType) -> list[object]:
    """The values in the closure; a variable that is not set yet has none."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values
