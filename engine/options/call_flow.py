"""Where a block hands its `transformer_options` on to, followed through the source of the code.

What code reads is told from the names in it, so all code that the dict reaches must be known. Each use of the dict is one of a
few that are understood (a lookup by a literal key, a copy, an argument of something that can be found without running it); any
other gives `Lost`. What comes out of the patches in the dict may be called with it: patches are looked at apart
(`options/patches.py`).
"""

from __future__ import annotations

import types
from collections.abc import Iterable

from torch import nn

from .named_objects import Unknown, arguments_of, rest_of
from .patches import FRAMES
from .source import NoSource
from .uses_of_options import BY_NAME, Lost, Uses


class Flow:
    """Follows the dict from the forward of a block.

    Args:
        codes: of the functions that it reaches.
        names: parameters that its entries become (`**options`).
    """

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self.names: set[str] = set()
        self._returns: dict[tuple, bool | None] = {}

    def follow(self, block: nn.Module) -> None:
        """Raises Lost."""
        forward = type(block).forward
        if not isinstance(forward, types.FunctionType):
            return
        arguments = arguments_of(forward.__code__)
        holding: Iterable[str | None] = {*BY_NAME}.intersection(arguments) or {rest_of(forward.__code__)[1]}
        try:
            self.enter(forward, {arguments[0]: [block]} if arguments else {}, holding)
        except Lost:
            raise
        except Exception as error:  # objects of others may raise anything when they are looked at; then they may read anything
            raise Lost(f"{type(error).__name__}: {error}") from error

    def enter(self, function: types.FunctionType, given: dict[str, list], holding: Iterable[str | None]) -> bool:
        """Look at a function; whether it gives the dict back.

        Args:
            given: what parameters may be, those of which it is known.
            holding: parameters that are the dict, or hold it.
        """
        held = frozenset(name for name in holding if name)
        if not held:
            return False
        code = function.__code__
        if (function.__globals__.get("__name__") or "").partition(".")[0] == "torch":
            raise Lost(f"{function.__qualname__} of PyTorch")
        if FRAMES.intersection(function.__code__.co_names):
            raise Lost(f"{function.__qualname__} looks at variables by name")
        # Decorated functions share the code of the decorator's wrapper, and differ in what it closes over.
        closure = tuple(map(id, function.__closure__ or ()))
        key = (code, closure, held, frozenset((name, tuple(map(id, objects))) for name, objects in given.items()))
        if key in self._returns:
            known = self._returns[key]
            if known is None:
                raise Lost(f"{function.__qualname__} calls itself")
            return known
        self._returns[key] = None
        self.codes.add(code)
        try:
            found = self._returns[key] = Uses(self, function, given, held).look()
        except (NoSource, Unknown) as error:
            raise Lost(f"{function.__qualname__}: {error}") from None
        return found
