"""Start threads, which the system may refuse, or a process that ends; and have threads yield the GIL to the sampler."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from .torch_settings import SharedScope

# The GIL's switch interval in `yielding`: seconds for which a thread keeps the GIL while another waits. The default is 0.005.
SWITCH_INTERVAL = 5e-5
_scope = SharedScope({"interval": (sys.getswitchinterval, sys.setswitchinterval)})


def started(thread: threading.Thread) -> bool:
    """Start the thread; returns whether that was possible."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def call_later(seconds: float, call: Callable[[], object]) -> None:
    """Call `call` after `seconds`, on a thread of its own, unless the process ends before."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    started(timer)


def yielding() -> AbstractContextManager:
    """A context for a thread that runs Python for seconds beside the sampler's.

    Each PyTorch operation releases the GIL, and then waits one interval to get it back (sys.setswitchinterval). With Python's
    default, a model whose weights are being loaded nearly stands still until the other thread is done.
    """
    return _scope.applied(interval=SWITCH_INTERVAL)
