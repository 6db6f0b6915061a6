"""Write files whole or not at all, also while another process reads what they replace."""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

# Windows replaces no file that a process has open (ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION); readers are soon done.
_BUSY = (5, 32)
TRIES, PAUSE_SECONDS = 20, 0.05


def replace(source: Path, target: Path) -> None:
    """Give `source` the name `target` in one step; if that fails, remove `source`.

    Raises:
        OSError: the file cannot be replaced, or on Windows is not closed within a second.
    """
    try:
        for further_tries in reversed(range(TRIES)):
            try:
                return os.replace(source, target)
            except OSError as error:
                if getattr(error, "winerror", None) not in _BUSY or not further_tries:
                    raise
            time.sleep(PAUSE_SECONDS)
    except BaseException:
        remove_file(source)
        raise


def write_whole(file: Path, content: bytes) -> None:
    """Not by `tempfile`, whose files other users cannot read."""
    unfinished = file.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_bytes(content)
    except BaseException:
        remove_file(unfinished)
        raise
    replace(unfinished, file)


def remove_file(file: Path) -> None:
    """Unless another user's rights forbid it (a folder with the sticky bit), or a process has it open (Windows)."""
    with suppress(OSError):
        file.unlink()
