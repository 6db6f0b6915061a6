"""Write files atomically, also while another process reads the file that is replaced."""

import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

_T = TypeVar("_T")
# Windows cannot replace a file that a process has open, nor open a file that is being replaced; both are soon over.
READERS_BLOCK = os.name == "nt"
TRIES, PAUSE_SECONDS = 20, 0.05
UNFINISHED, LEFTOVER_SECONDS = re.compile(r"[0-9a-f]{32}\.tmp"), 3600


def when_free(action: Callable[[], _T]) -> _T:
    """The result of `action` on a file. On Windows, retried for a second while other processes forbid `action`."""
    for further_tries in reversed(range(TRIES)):
        try:
            return action()
        except PermissionError:
            if not READERS_BLOCK or not further_tries:
                raise
        time.sleep(PAUSE_SECONDS)
    raise AssertionError("unreachable")


def read_whole(file: Path) -> bytes:
    return when_free(file.read_bytes)


def replace(source: Path, target: Path) -> None:
    """Give `source` the name `target` in one step; if that fails, remove `source`.

    Raises:
        OSError: the file cannot be replaced, or on Windows is not closed within a second.
    """
    try:
        when_free(lambda: os.replace(source, target))
    except BaseException:
        remove_file(source)
        raise


def write_whole(file: Path, content: bytes) -> None:
    """Write a new file in the same folder, and rename it to `file`. Only its owner could read a file of `tempfile`."""
    unfinished = file.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_bytes(content)
    except BaseException:
        remove_file(unfinished)
        raise
    replace(unfinished, file)


def files_in(folder: Path, pattern: str) -> list[Path]:
    """Files whose names match `pattern`; none if the drive fails."""
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of killed processes. A younger file is left, as a process may still be writing it."""
    for file in files_in(folder, "*.tmp"):
        with suppress(OSError):
            if UNFINISHED.fullmatch(file.name) and time.time() - file.lstat().st_mtime > LEFTOVER_SECONDS:
                remove_file(file)


def remove_file(file: Path) -> None:
    """Remove `file`, unless permissions forbid it (a folder with the sticky bit) or a process keeps it open (Windows)."""
    with suppress(OSError):
        when_free(file.unlink)


def status_of(file: Path) -> os.stat_result | None:
    """The status of `file`; None if it was removed or renamed meanwhile."""
    with suppress(OSError):
        return file.stat()
    return None


def locked(file: Path) -> IO | None:
    """Open and lock a file until it is closed or this process ends; None where another process holds the lock.

    Raises:
        OSError: it cannot be opened.
    """
    opened = open(file, "ab")  # noqa: SIM115  whoever holds the lock closes it
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(opened.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        opened.close()
        return None
    return opened
