"""Remember what has been warmed up, so that the same thing is not run again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from ..identity import Same

# Warmups that are remembered of a model.
MOST = 200


class Compiled(Protocol):
    """Blocks that share compiled code, see `compile/group.py`."""

    def variants(self) -> list[object] | None: ...


class WarmRecord:
    """The warmups of one model, each with the compiled code there was when it ended."""

    def __init__(self) -> None:
        self._ran: dict[Hashable, set[Same]] = {}

    def __len__(self) -> int:
        return len(self._ran)

    def add(self, what: Hashable, groups: Iterable[Compiled]) -> None:
        """Note that `what` has run to its end; `groups` are the compiled code it may have used."""
        variants = _variants(groups)
        if variants is not None:
            self._ran[what] = variants
        if len(self._ran) > MOST:
            del self._ran[next(iter(self._ran))]

    def holds(self, what: Hashable, groups: Iterable[Compiled]) -> bool:
        """Whether `what` has run, and PyTorch still has all the code of then."""
        before, now = self._ran.get(what), _variants(groups)
        return before is not None and now is not None and before <= now


def _variants(groups: Iterable[Compiled]) -> set[Same] | None:
    """None where PyTorch does not tell."""
    found = [group.variants() for group in groups]
    return None if None in found else {Same(code) for codes in found for code in codes or ()}
