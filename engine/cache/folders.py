"""Check folders that hold code: who may write them, what in them is damaged, what a killed process has left in them."""

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
from contextlib import suppress
from pathlib import Path

from ..failures.describe import chain
from ..log import logger

# Of the files that are written under their final name, those that are never empty (locks and the choices of autotuning are).
NEVER_EMPTY = {".so", ".pyd", ".dll", ".dylib", ".cubin", ".hsaco", ".json", ".py", ".cpp"}
# Another process may be writing a file that is younger.
WRITTEN_SECONDS = 60
LEFTOVER_SECONDS = 3600
# Of cache files. Not .safetensors, which stands for "no code inside".
SUFFIX = ".tckcache"
UNTRUSTED = ".untrusted"  # appended to the name of a cache file that others could have written
KIND = re.compile(r"[0-9a-f]{12}")  # the folder of a group of blocks, see `disk.folder_name`
# The bits of a mode that let group and others write.
OTHERS = stat.S_IWGRP | stat.S_IWOTH
# What inductor, Triton and this pack write under before they rename it.
_LEFTOVER = re.compile(r".*\.tmp|tmp\.pid_.*|torch-compile-kit-.*\.partial|incoming-.*")


class NoRightsError(PermissionError):
    """A folder is on a drive that keeps no rights: whoever reaches it may write (WSL's /mnt, NTFS, SMB, volumes of pods)."""


def make_private(*folders: Path) -> None:
    """Make folders that only this user may enter, each in the one before. Where others could write into one of them, what is
    run from the last is removed: it could be theirs.

    Raises:
        OSError: see `close_to_others`.
    """
    were_open = [close_to_others(folder) for folder in folders]
    if any(were_open):
        folder = folders[-1]
        # The rest is not run, and may be the user's.
        entries = [entry for entry in folder.iterdir() if KIND.fullmatch(entry.name) or KIND.fullmatch(folder.name)]
        if entries:
            logger.warning(
                "compiled code is removed from %s, since others could have written it: %d entries, %.1f MiB. "
                "Where each start opens the folder to others (chmod -R, a pod's fsGroup), set TORCHINDUCTOR_CACHE_DIR to "
                "another folder",
                folder,
                len(entries),
                sum(map(size_of, entries)) / 1024**2,
            )
        for entry in entries:
            remove(entry)


def close_to_others(folder: Path) -> bool:
    """Make a folder, and the missing ones above it, that only this user may enter; one that is there already is closed to
    others, and cache files in it that they could have written get another name. On Windows profiles are private.

    Returns:
        Whether others could write into it.

    Raises:
        NoRightsError: it cannot be closed.
        OSError: it cannot be made, or belongs to another user.
    """
    for missing in reversed([above for above in folder.parents if not above.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return False
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to another user (uid {status.st_uid}, this is {os.geteuid()}), and what is in it would be run: "
            "change its owner, or remove it"
        )
    if not status.st_mode & OTHERS:
        return False
    with suppress(OSError):
        folder.chmod(0o700)
    if not _others_may_write(status):
        return False
    if _others_may_write(folder.stat()):
        raise NoRightsError(f"others may write into {folder} ({stat.filemode(status.st_mode)}), and its drive keeps no rights")
    logger.warning("others could write into %s (%s); it is closed to them now", folder, stat.filemode(status.st_mode))
    for file in folder.glob(f"*{SUFFIX}"):
        written = file.lstat()
        if written.st_uid != os.geteuid() or _others_may_write(written):
            file.rename(f"{file}{UNTRUSTED}")
            logger.warning("others could write %s; if it is as you have put it there, take .untrusted off its name", file)
    return True


def _others_may_write(status: os.stat_result) -> bool:
    mode = status.st_mode
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and status.st_gid != _private_group())


def _private_group() -> int | None:
    """The group that Ubuntu and Fedora make for each user: named like the user, with no other member. Under the umask 0002 that
    goes with it the group may write whatever the user makes. None: this user has no such group."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:  # a user without a name, as in containers
        return None
    members = {*group.gr_mem, *(other.pw_name for other in pwd.getpwall() if other.pw_gid == group.gr_gid)}
    # OpenShift runs users without a name in root's group.
    private = group.gr_gid == os.getegid() != 0 and group.gr_name == user.pw_name and members <= {user.pw_name}
    return group.gr_gid if private else None


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
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def write_json(file: Path, content: object, indent: int | None = None) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
        out.write(json.dumps(content, indent=indent))
    os.replace(out.name, file)
