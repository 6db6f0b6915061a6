"""Start threads, which the system or an ending process may refuse; have threads yield the GIL to the sampler; and keep the
frames of a call in one piece of memory."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

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


def in_one_piece(call: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Make a call whose frames, and those of all that it calls, lie in one piece of memory.

    Since 3.11 Python keeps frames in pieces of 16 KiB, and gives a piece back to the system when the first frame in it returns
    (CPython, Python/pystate.c, `push_chunk` and `_PyThreadState_PopFrame`). Where a piece ends just below a loop, each function
    that the loop calls costs two system calls and a page, 7 us instead of 0.02 on a virtual machine. A frame that is larger
    than a piece gets a separate piece, of the next power of two, and the functions that it calls get the rest.
    """
    return call(*args, **kwargs)


# Words of the frame of `in_one_piece`: a little more than 512 KiB, so that its piece has 1 MiB. Pages that no frame uses are
# never touched.
with suppress(ValueError, OverflowError):  # a Python that limits the size of frames
    in_one_piece.__code__ = in_one_piece.__code__.replace(co_stacksize=66_000)
