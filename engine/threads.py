"""Start threads in a process that may have no room for another, or that ends; and have them make room for others."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from .torch_settings import SharedScope

# Seconds for which a thread may run Python while another waits for its turn; Python's own are 0.005.
SWITCH_INTERVAL = 5e-5
_scope = SharedScope({"interval": (sys.getswitchinterval, sys.setswitchinterval)})


def started(thread: threading.Thread) -> bool:
    """Start the thread; whether that was possible."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def call_later(seconds: float, call: Callable[[], object]) -> None:
    """On a thread of its own, unless the process ends before."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    started(timer)


def yielding() -> AbstractContextManager:
    """A context for seconds of Python on a thread beside the sampler's.

    Each operation of PyTorch's releases Python's lock, and waits for one interval to get it back: with Python's own interval a
    model whose weights are being loaded stands nearly still until the other thread is done (sys.setswitchinterval).
    """
    return _scope.applied(interval=SWITCH_INTERVAL)
