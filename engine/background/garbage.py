"""Python's full collections of garbage, put off while code is made.

One looks at every object there is and keeps Python's lock meanwhile: 0.3 s with the 700,000 objects of a server that has
imported PyTorch's compiler, and compiling makes so many that one follows the other. They found 400 objects of no use.
Those of young objects go on, and so do the ones that the host asks for (main.py, after a prompt).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..torch_settings import SharedScope

NEVER = 2**30
# Seconds: how often and for how long the end waits for a moment in which nobody waits for Python.
ASK, PATIENCE = 0.2, 60.0


def _set_threshold(of_full: int) -> None:
    gc.set_threshold(*gc.get_threshold()[:2], of_full)


_scope = SharedScope({"of_full": (lambda: gc.get_threshold()[2], _set_threshold)})


@contextmanager
def full_collections_put_off(is_busy: Callable[[], bool]) -> Iterator[None]:
    """While it lasts, and then until the host rests, Python begins no full collection by itself.

    Args:
        is_busy: whether the host executes a prompt.
    """
    with _scope.applied(of_full=NEVER):
        yield
        end = time.monotonic() + PATIENCE
        while is_busy() and time.monotonic() < end:
            time.sleep(ASK)
