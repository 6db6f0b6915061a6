"""Take the code of a graph from where it is kept, or have the compile process make it."""

import time
from dataclasses import dataclass

from ..background.thread import Postponed
from ..cache import code_store, shared
from ..cache.environment import environment
from ..cache.stores import CLAIM_SECONDS
from ..log import logger
from .client import Code, LowerInline, compile_process
from .request import Request, holds

# How many codes of one graph are kept: lowering may add guards that do not hold for other sizes.
VARIANTS = 8


@dataclass(frozen=True)
class Obtained:
    """Code, the name of its entry, and whether it was kept: nothing was lowered."""

    code: Code
    name: str
    was_kept: bool


def obtain(request: Request, block: str, patient: bool, distrusted: frozenset[str] = frozenset()) -> Obtained:
    """The code of a request.

    Args:
        block: the class of the block, for people who look at the entries.
        patient: where another machine makes this code, raise `Postponed` instead of making it here as well.
        distrusted: names of entries that could not be loaded; they are replaced.

    Raises:
        Postponed: see `patient`.
        Unavailable, Lost, LoweringFailed, LowerInline: see client.py.
    """
    store, others = code_store.current(), shared.configured()
    kept = _kept(store, request, distrusted)
    if isinstance(kept, Obtained):
        return kept
    name, claimed = kept, None
    try:
        if others is not None and not distrusted:
            claimed = name if others.claim(name) else None
            if claimed and store is not None:
                kept = _kept(store, request, distrusted)
                if isinstance(kept, Obtained):
                    return kept  # the worker that had the claim has compiled the graph meanwhile
                name = kept
            if not claimed and patient:
                now = time.monotonic()
                if now - others.waiting_since.setdefault(name, now) < CLAIM_SECONDS:
                    raise Postponed("another worker compiles this graph")
            others.waiting_since.pop(name, None)
        code = compile_process.lower(request.text, patient)
        if not holds(code.guards, request.sizes):
            raise LowerInline("the guards of its code do not hold for its own sizes")
        if store is not None:
            store.put(name, code.packed({"class": block, "environment": environment()}), others)
        return Obtained(code, name, False)
    finally:
        if claimed and others is not None:
            others.release(claimed)


def _kept(store: code_store.CodeStore | None, request: Request, distrusted: frozenset[str]) -> Obtained | str:
    """The code that is kept and holds for the request's sizes, else the name under which such code is to be kept."""
    name = request.key
    for number in range(VARIANTS):
        name = f"{request.key}-{number}" if number else request.key
        content = store.get(name) if store is not None and name not in distrusted else None
        if content is None:
            break
        try:
            code = Code.unpacked(content)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the entry %s cannot be read (%s): its code is compiled anew", name, error)
            break
        if holds(code.guards, request.sizes):
            return Obtained(code, name, True)
    return name
