"""Start threads in a process that may have no room for another, or that ends."""

import threading


def started(thread: threading.Thread) -> bool:
    """Start the thread; whether that was possible."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
