"""One call of a model, and the code that it lacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .stand_in import StandIn


class Maker(Protocol):
    def make(self, variant: Any, stand_in: StandIn) -> None: ...


class CodeRequest(NamedTuple):
    """Code that a call would have needed: `maker` makes it, and knows the call as `variant`."""

    maker: Maker
    variant: object
    stand_in: StandIn


def submit(requests: list[CodeRequest]) -> None:
    """Have the code made. Not in the middle of a call: the thread would take Python's lock from it."""
    for request in requests:
        request.maker.make(request.variant, request.stand_in)
    requests.clear()


@dataclass
class ModelCall:
    """One call of a model, for all its blocks.

    Args:
        waits: code that is not there is compiled now; else the block runs eager, and a thread compiles.
        poll: called while something is waited for; may raise to stop (the host's interrupt).
        ran: blocks have run in it; in a replay of a CUDA graph none do.
        eager: groups (by `id`) and shapes that run eager in this call: a group does not change over in the middle of it.
        requests: the code that such calls lacked; see `submit`.
    """

    waits: bool = True
    poll: Callable[[], None] = lambda: None
    ran: bool = False
    eager: set[tuple] = field(default_factory=set)
    requests: list[CodeRequest] = field(default_factory=list)
