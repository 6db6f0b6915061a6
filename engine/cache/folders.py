"""Folders that hold code: who may write them, what in them is damaged, what a killed process has left in them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import stat
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from ..failures.describe import chain

# Of the files that are written under their final name, those that are never empty (locks and the choices of autotuning are).
NEVER_EMPTY = {".so", ".pyd", ".dll", ".dylib", ".cubin", ".hsaco", ".json", ".py", ".cpp"}
# Another process may be writing a file that is younger.
WRITTEN_SECONDS = 60
LEFTOVER_SECONDS = 3600
# What inductor, Triton and this pack write under before they rename it.
_LEFTOVER = re.compile(r".*\.tmp|tmp\.pid_.*|torch-compile-kit-.*\.partial|incoming-.*")


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, and see that one that is there already can be trusted.

    Raises:
        OSError: it cannot be made; or (POSIX) it is not this user's, or others may write into it: code in it could be theirs.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raise PermissionError where somebody else could have put code into it (POSIX; on Windows profiles are private)."""
    if not hasattr(os, "geteuid"):
        return
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to another user (uid {found.st_uid}, this is {os.geteuid()}), and what is in it would be run: "
            "change its owner, or remove it"
        )
    if found.st_mode & 0o022:
        raise PermissionError(
            f"others may write into {folder} ({stat.filemode(found.st_mode)}), and what is in it would be run: chmod 700 it, "
            "or remove it"
        )


def is_damaged(folder: Path, age: float = 0.0) -> bool:
    """Whether a file of code in it is empty or begins with zeros, as a loss of power leaves files.

    Args:
        age: seconds since a file was written before it counts.
    """
    for file in files_in(folder):
        try:
            if os.path.splitext(file)[1] in NEVER_EMPTY and time.time() - os.lstat(file).st_mtime >= age:
                with open(file, "rb") as opened:
                    if not opened.read(16).strip(b"\0"):
                        return True
        except OSError:
            continue
    return False


def comes_from(error: BaseException, folder: Path) -> bool:
    """Whether it was raised while something in `folder` was loaded: a library or a module that is cut off, a pickle.

    A compiler's error is none of these, though it names the files it compiles; nor is a full disk.
    """
    below = str(folder) + os.sep
    for cause in chain(error):
        if isinstance(cause, EOFError | pickle.UnpicklingError):
            return True
        loads = isinstance(cause, ImportError | SyntaxError) or (isinstance(cause, OSError) and cause.errno is None)
        if (loads or "Failed to import " in str(cause)) and below in f"{cause} {getattr(cause, 'filename', '')}":
            return True
        frames = traceback.extract_tb(cause.__traceback__)
        if any(frame.name == "<module>" and frame.filename.startswith(below) for frame in frames):
            return True
    return False


def remove_leftovers(paths: Iterator[Path] | list[Path]) -> None:
    """Of these, remove what a process that was killed an hour ago or earlier had not finished."""
    for path in paths:
        try:
            if _LEFTOVER.fullmatch(path.name) and time.time() - path.lstat().st_mtime > LEFTOVER_SECONDS:
                remove(path)
        except OSError:  # gone meanwhile
            continue


def remove(path: Path) -> int:
    """Remove it; what the system holds on to (loaded code on Windows) stays, and its size is returned."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return size_of(path)


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    total = 0
    for file in files_in(folder):
        try:
            total += os.lstat(file).st_size
        except OSError:
            continue
    return total


def files_in(folder: Path) -> Iterator[str]:
    for parent, _folders, files in os.walk(folder):
        for name in files:
            yield os.path.join(parent, name)


def read_json(file: Path) -> dict:
    """Empty where there is none, or none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def write_json(file: Path, content: object, indent: int | None = None) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as made:
        made.write(json.dumps(content, indent=indent))
    os.replace(made.name, file)
