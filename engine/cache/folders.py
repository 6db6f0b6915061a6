"""Close the folder of cache files to others, who could write into it."""

import ctypes
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path, PurePath

from ..log import logger

# Of cache files; .safetensors stands for "no code inside".
SUFFIX = ".tckcache"
UNTRUSTED = ".untrusted"  # appended to the name of a cache file that others could have written
# The bits of a mode that let group and others write.
OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


def close_to_others(folder: Path) -> None:
    """Make a folder, and the missing ones above, that only this user may enter.

    If others could write into the folder, cache files in it that others could have written get another name. On a drive that
    keeps no rights (WSL's /mnt, NTFS, SMB, volumes of pods) nobody can tell: nothing is done. Windows' profiles are private.

    Raises:
        OSError: the folder cannot be made, or belongs to another user.
    """
    for missing in reversed([above for above in folder.parents if not above.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder} belongs to another user (uid {status.st_uid}, this is {os.geteuid()}), and what is in it would be run: "
            "change its owner, or remove it"
        )
    if not status.st_mode & OTHERS:
        return
    with suppress(OSError):
        folder.chmod(0o700)
    if not _others_may_write(status) or _others_may_write(folder.stat()):
        return
    logger.warning("others could write into %s (%s); it is closed to them now", folder, stat.filemode(status.st_mode))
    for file in folder.glob(f"*{SUFFIX}"):
        written = file.lstat()
        if written.st_uid != os.geteuid() or _others_may_write(written):
            file.rename(f"{file}{UNTRUSTED}")
            logger.warning("others could write %s; if it is as you have put it there, take .untrusted off its name", file)


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
