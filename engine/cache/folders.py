"""Check folders that hold code: who may write them, what in them is damaged, what a killed process has left in them."""

import ctypes
import errno
import json
import os
import pickle
import re
import shutil
import stat
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath

from ..failures.describe import chain
from ..files import read_whole, write_whole
from ..log import logger

# Suffixes of files that are written under their final name and never empty, as locks and the choices of autotuning are.
NEVER_EMPTY = {".so", ".pyd", ".dll", ".dylib", ".cubin", ".hsaco", ".json", ".py", ".cpp"}
# Another process may still be writing a younger file.
WRITTEN_SECONDS = 60
LEFTOVER_SECONDS = 3600
# Of cache files; .safetensors stands for "no code inside".
SUFFIX = ".tckcache"
UNTRUSTED = ".untrusted"  # appended to the name of a cache file that others could have written
KIND = re.compile(r"[0-9a-f]{12}")  # the folder of a group of blocks, see `disk.folder_name`
# The bits of a mode that let group and others write.
OTHERS = stat.S_IWGRP | stat.S_IWOTH
# Names under which files are written at first: in a group's folder those of inductor, Triton and this pack, ...
IN_GROUP = re.compile(r".*\.tmp|tmp\..*")
# ... elsewhere, where the user may keep files too, those of this pack as `tempfile` makes them.
ELSEWHERE = re.compile(r"torch-compile-kit-[a-z0-9_]{8}\.partial|incoming-[a-z0-9_]{8}")


def is_split(path: PurePath) -> bool:
    """Whether C++ compilers get a path in pieces: PyTorch splits an unquoted command line (torch/_inductor/cpp_builder.py)."""
    return re.search(r"[\s'\"\\]", path.as_posix()) is not None


def unsplit(path: Path) -> Path:
    """On Windows, where users are named "Jane Doe", the short name of such a path; drives without short names keep the path."""
    if sys.platform != "win32" or not is_split(path):
        return path
    there = next(parent for parent in (path, *path.parents) if parent.exists() or parent == parent.parent)
    buffer = ctypes.create_unicode_buffer(2**15)
    is_done = ctypes.windll.kernel32.GetShortPathNameW(str(there), buffer, len(buffer))
    return Path(buffer.value, path.relative_to(there)) if is_done else path


class NoRightsError(PermissionError):
    """Say that others may write into a folder whose drive keeps no rights (WSL's /mnt, NTFS, SMB, volumes of pods)."""


def make_private(*folders: Path) -> None:
    """Make folders that only this user may enter, each in the one before. Where others could write into one of them, remove
    the code from the last: it could be theirs.

    Raises:
        OSError: see `close_to_others`.
    """
    were_open = [close_to_others(folder) for folder in folders]
    if any(were_open):
        folder = folders[-1]
        # The rest is not run, and may be the user's.
        entries = [entry for entry in folder.iterdir() if KIND.fullmatch(entry.name) or KIND.fullmatch(folder.name)]
        if entries:
            size = f"{len(entries)} entries, {sum(map(size_of, entries)) / 1024**2:.1f} MiB"
            logger.warning(
                "compiled code is removed from %s, since others could have written it: %s. Where each start opens the folder "
                "to others (chmod -R, a pod's fsGroup), set TORCH_COMPILE_KIT_CACHE to another folder",
                folder,
                size,
            )
        for entry in entries:
            remove(entry)


def close_to_others(folder: Path) -> bool:
    """Make a folder, and the missing ones above, that only this user may enter; returns whether others could write into it.

    If others could, cache files in the folder that others could have written get another name. Windows' profiles are private.

    Raises:
        NoRightsError: the folder cannot be closed.
        OSError: the folder cannot be made, or belongs to another user.
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
        raise NoRightsError(
            f"others may write into {folder} ({stat.filemode(status.st_mode)}), and its drive keeps no rights (docs/fleet.md "
            "says how a shared cache may be there)"
        )
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
    """The group that Ubuntu and Fedora make for each user, named like the user and with no other member, or None.

    The umask 0002 that goes with such a group lets the group write whatever the user makes.
    """
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
    """Whether a file of code that is `age` seconds old is empty or begins with zeros, as a loss of power leaves it."""
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
    """Whether loading a truncated library, module or pickle in `folder`, or a kernel for another GPU, raised the error.

    A compiler's error names files in the folder, too, and is raised while a module in it runs, and a full disk raises OSError;
    none of these counts. A folder is for the current GPU by name, and so are PyTorch's keys: of another in the machine,
    exchanged since, kernels are found again.
    """
    for cause in chain(error):
        if isinstance(cause, EOFError | pickle.UnpicklingError) or "no kernel image is available" in str(cause):
            return True
        frames = traceback.extract_tb(cause.__traceback__)
        raised_in = frames[-1] if frames else None
        # What is no library has on Windows an error number (193), and the error of `ctypes` does not name the file.
        is_no_library = isinstance(cause, OSError) and cause.errno == errno.ENOEXEC
        if is_no_library and raised_in is not None and raised_in.filename == ctypes.__file__:
            return True
        loads = isinstance(cause, ImportError | SyntaxError) or (isinstance(cause, OSError) and cause.errno is None)
        named = f"{cause} {getattr(cause, 'filename', '')} {getattr(cause, 'path', '')}"
        if (loads or "Failed to import " in str(cause)) and _is_in(folder, named):
            return True
        # A source that is cut off; what a module calls, such as a compiler, raises in a frame of its own.
        if raised_in is not None and raised_in.name == "<module>" and _is_in(folder, raised_in.filename):
            return True
    return False


def _is_in(folder: Path, text: str) -> bool:
    """Whether a text has a path of something in the folder; PyTorch's have "/" on Windows, too."""
    return f"{folder.as_posix()}/" in text.replace(os.sep, "/")


def remove_leftovers(paths: Iterable[Path], names: re.Pattern = ELSEWHERE) -> None:
    """Of these, remove what a process had not finished when it was killed, an hour ago or earlier."""
    for path in paths:
        try:
            if names.fullmatch(path.name) and time.time() - path.lstat().st_mtime > LEFTOVER_SECONDS:
                remove(path)
        except OSError:  # gone meanwhile
            continue


def remove(path: Path) -> int:
    """Remove a file or folder; returns the bytes that stay, as the system holds them (loaded code on Windows)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return size_of(path)


def size_of(folder: Path) -> int:
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
    """The object in a file; empty if it cannot be read."""
    try:
        content = json.loads(read_whole(file))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def write_json(file: Path, content: object, indent: int | None = None) -> None:
    write_whole(file, json.dumps(content, indent=indent).encode())
