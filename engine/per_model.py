"""What is kept for each model, and goes with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import nn

T = TypeVar("T")


class PerModel(Generic[T]):
    """One value for each module, made when it is first asked for and freed with the module.

    Args:
        make: called with the module; what it returns must not refer to it.
    """

    def __init__(self, make: Callable[[nn.Module], T]):
        self._make = make
        self._values: weakref.WeakKeyDictionary[nn.Module, T] = weakref.WeakKeyDictionary()

    def __call__(self, model: nn.Module) -> T:
        value = self._values.get(model)
        if value is None:
            value = self._values[model] = self._make(model)
        return value

    def items(self) -> list[tuple[nn.Module, T]]:
        """Of all modules that are still in memory."""
        models = [ref() for ref in self._values.keyrefs()]  # at once: other threads add to them meanwhile
        found = [(model, self._values.get(model)) for model in models if model is not None]
        return [(model, value) for model, value in found if value is not None]
