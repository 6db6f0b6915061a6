"""Store compiled code by content hash: in a folder of the user, and in the cache that machines share (shared.py).

`<name>.code` is a signature and the bytes of one graph's code; `<structure>.json` holds choices that were measured for a model.
The signature is an HMAC with a key in the same folder that only this user can read: a file that is damaged, or that somebody
else has put there, is no entry. So the folder's permissions do not matter, several servers can use the folder, and any file can
be removed at any time: loaded code goes on working.

When all entries together exceed the limit, the least recently used are evicted.
"""

import errno
import json
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..failures.describe import in_one_line
from ..files import (
    READERS_BLOCK,
    files_in,
    read_whole,
    remove_file,
    remove_leftovers,
    replace,
    status_of,
    when_free,
    write_whole,
)
from ..log import logger
from .environment import FOLDER, KIT, environment, limit_in_bytes, users_folder
from .shared import configured
from .stores import SIGNATURE_BYTES, signed, verified

NAME = re.compile(r"[0-9a-f]{64}(-[1-9])?")
STRUCTURE = re.compile(r"[0-9a-f]{12}")
CODE, CHOICES = ".code", ".json"
KEY_FILE = "signature.key"
# How many entries `has_current` looks at.
LOOKED_AT = 8
# Held while a file of choices is read and written again: several threads add choices.
_choices_lock = threading.Lock()


@dataclass
class CodeStore:
    """The entries in one folder: `limit` bytes at most, signed with `key`."""

    folder: Path
    limit: int
    key: bytes
    _is_unwritable: bool = False

    def get(self, name: str) -> bytes | None:
        """The content of an entry, here or in the shared cache. Do not call this on a thread that the sampler waits for."""
        content = self.read(name)
        if content is None and (shared := configured()) is not None and (content := shared.get(name)) is not None:
            self.put(name, content)
        return content

    def put(self, name: str, content: bytes) -> bool:
        """Keep an entry; returns whether it was written. If not, the log says so once."""
        is_written = self._write(self._file(name), signed(self.key, name, content))
        self.trim()
        return is_written

    def read(self, name: str, is_use: bool = True) -> bytes | None:
        """The content of an entry in this folder; None if there is no valid one. `is_use`: counts as a use, for eviction."""
        file = self._file(name)
        try:
            entry = read_whole(file)
        except OSError:
            return None
        if is_use:
            self.note_use(name)
        if (content := verified(self.key, name, entry)) is not None:
            return content
        logger.warning("%s is damaged, or was not written by this user: its code is compiled anew", file)
        remove_file(file)
        return None

    def note_use(self, name: str) -> None:
        with suppress(OSError):  # the folder can be on a read-only volume
            os.utime(self._file(name))

    def _write(self, file: Path, content: bytes) -> bool:
        try:
            write_whole(file, content)
        except OSError as error:
            if not self._is_unwritable:
                self._is_unwritable = True
                logger.warning("compiled code is not kept in %s: %s", self.folder, in_one_line(error))
            return False
        return True

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{CODE}"

    def entries(self) -> dict[str, os.stat_result]:
        """All entries by name, the most recently used first. Entries dated in the future, by a wrong clock, come last."""
        files = [file for file in files_in(self.folder, f"*{CODE}") if NAME.fullmatch(file.stem)]
        entries = {file.stem: status for file in files if (status := status_of(file)) is not None}
        latest = time.time() + 3600
        return dict(sorted(entries.items(), key=lambda entry: (entry[1].st_mtime > latest, -entry[1].st_mtime)))

    def choices(self, structure: str) -> dict[str, str]:
        """The choices that `remember` stored in this process or an earlier one."""
        with suppress(OSError):
            return self._choices(structure)
        return {}

    def _choices(self, structure: str) -> dict[str, str]:
        """As `choices`, but raises OSError if the file may exist and cannot be read."""
        try:
            kept = header_of(read_whole(self.folder / f"{structure}{CHOICES}"))
        except (FileNotFoundError, ValueError):
            return {}
        return {name: value for name, value in kept.items() if isinstance(value, str)}

    def remember(self, structure: str, choices: dict[str, str]) -> None:
        """Keep choices on which the compiled code of a model depends; `structure`: see `structure.py`."""
        file = self.folder / f"{structure}{CHOICES}"
        with _choices_lock, suppress(OSError):  # writing without the earlier choices would lose them
            self._write(file, json.dumps(self._choices(structure) | choices).encode())

    def about(self, name: str) -> dict[str, Any]:
        """The header of an entry: the class of the block, versions, device; empty if the entry cannot be read."""
        try:
            with self._file(name).open("rb") as file:
                file.seek(SIGNATURE_BYTES)
                header = header_of(file.readline())
        except (OSError, ValueError):
            return {}
        return header if isinstance(header.get("environment"), dict) else {}

    def has_current(self) -> bool:
        return any(map(self.is_current, [*self.entries()][:LOOKED_AT]))

    def is_current(self, name: str) -> bool:
        """Whether an entry was compiled with the current versions for the current device."""
        return environment().items() <= self.about(name).get("environment", {}).items()

    def has(self, name: str) -> bool:
        return os.path.exists(self._file(name))  # `Path.exists` raises if the drive fails

    def size(self) -> int:
        return sum(status.st_size for status in self.entries().values())

    def trim(self) -> int:
        """Evict the least recently used entries until the rest is within the limit; returns the bytes removed."""
        remove_leftovers(self.folder)
        kept = removed = 0
        for name, status in self.entries().items():
            if kept + status.st_size > self.limit:
                remove_file(self._file(name))
                removed += status.st_size
            else:
                kept += status.st_size
        if removed:
            logger.info("compile cache: %d MiB removed, %d MiB kept in %s", removed >> 20, kept >> 20, self.folder)
        return removed

    def clear(self) -> int:
        """Remove all entries and choices; returns the bytes removed. Loaded code goes on working."""
        before = self.size()
        choices = (file for file in files_in(self.folder, f"*{CHOICES}") if STRUCTURE.fullmatch(file.stem))
        for file in (*map(self._file, self.entries()), *choices):
            remove_file(file)
        return before - self.size()

    def usage(self) -> dict[str, Any]:
        """Folder, sizes and entries for the page and for scripts."""
        entries = []
        for name, status in self.entries().items():
            about = self.about(name)
            told = {"name": name, "bytes": status.st_size, "class": about.get("class")}
            entries.append({**about.get("environment", {}), **told})
        size = sum(entry["bytes"] for entry in entries)
        return {"folder": str(self.folder), "bytes": size, "entries": entries, "limit": self.limit}


def packed(header: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """Concatenate a line of JSON (the header, with names and sizes of the parts) and the parts."""
    sizes = [[name, len(part)] for name, part in parts.items()]
    return b"".join([json.dumps({**header, "parts": sizes}).encode(), b"\n", *parts.values()])


def unpacked(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Undo `packed`: returns header and parts; raises ValueError, KeyError or TypeError for other content."""
    at, parts = content.find(b"\n") + 1, {}
    header = header_of(content[:at])
    for name, size in header["parts"]:
        parts[name] = content[at : at + size]
        at += size
    if at != len(content):
        raise ValueError("its parts do not fit")
    return header, parts


def header_of(line: bytes) -> dict[str, Any]:
    """The object that a line of JSON holds; ValueError if there is none."""
    try:
        header = json.loads(line)
    except RecursionError:
        header = None
    if not isinstance(header, dict):
        raise ValueError("no header")
    return header


class _Current:
    store: CodeStore | None = None
    opened = False
    lock = threading.Lock()


def current() -> CodeStore | None:
    """The store of this process; None before `open_store`, or if no folder can be written."""
    return _Current.store


def open_store(folder: Path, limit: object = None) -> CodeStore | None:
    """Open the store of this process in the folder of `environment.users_folder`, else in `folder`; later calls change nothing.
    If that folder cannot be written, or its drive has no permissions (WSL's /mnt, NTFS, SMB, volumes of pods), use another
    folder of this user, and log that. The user's setting `limit` is in GiB.
    """
    if _Current.opened:
        return _Current.store
    with _Current.lock:
        if not _Current.opened:
            refused = []
            for place in _places(folder):
                try:
                    place.mkdir(mode=0o700, parents=True, exist_ok=True)
                    _Current.store = CodeStore(place, limit_in_bytes(limit), read_key(place))
                    break
                except OSError as error:
                    refused.append(f"{place} cannot be used: {error}")
            if refused:
                logger.warning(
                    "the cache folder %s. Compiled code goes to %s; %s names another folder",
                    "; ".join(refused),
                    _Current.store.folder if _Current.store else "no other, and is lost at the next restart",
                    FOLDER,
                )
            _Current.opened = True
        return _Current.store


def was_opened_before(folder: Path) -> bool:
    """Whether an earlier process has opened a store in one of the folders of `open_store`; creates nothing."""
    return any(os.path.isfile(place / KEY_FILE) for place in _places(folder))  # `Path.is_file` may raise PermissionError


def _places(folder: Path) -> list[Path]:
    """Folders for the store, best first."""
    user = os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "")
    # Of this user alone, on drives with permissions; a container's user may have no home.
    home = Path(os.path.expanduser("~"), ".cache", KIT, folder.name)
    places = [users_folder() or folder, home]
    with suppress(OSError):  # raised if no temporary folder can be written
        places.append(Path(tempfile.gettempdir(), f"{KIT}-{user}", folder.name))
    return [place for place in places if place.is_absolute()]


def read_key(folder: Path) -> bytes:
    """The key that signs a folder's entries, replaced if others could have read it. OSError: the drive has no permissions."""
    file = folder / KEY_FILE
    if not (key := _key_in(file)):
        if os.path.lexists(file) and not _key_in(file):  # read again: another server may just have made the key
            mode = stat.filemode(file.lstat().st_mode)
            logger.warning("%s (%s) was not for this user alone, or is damaged: all code is compiled anew", file, mode)
            remove_file(file)
        unfinished = folder / f"{secrets.token_hex(16)}.tmp"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as opened:
            opened.write(secrets.token_bytes(SIGNATURE_BYTES))
        try:
            os.link(unfinished, file)  # servers that start at the same time all use the first key
        except FileExistsError:
            pass
        except OSError:  # a drive without hard links
            replace(unfinished, file)
        remove_file(unfinished)
        key = _key_in(file)
    if not key:
        remove_file(file)
        raise OSError(f"its drive keeps no rights, and others could read {KEY_FILE} there")
    return key


def _key_in(file: Path) -> bytes:
    """The key in a file that only this user can read; empty if there is none. The file is opened once for permissions and
    content: whoever may write into the folder could replace the file in between."""
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # opening a named pipe would block
        flags |= getattr(os, name, 0)
    try:
        with os.fdopen(when_free(lambda: os.open(file, flags)), "rb") as opened:
            status, key = os.fstat(opened.fileno()), opened.read(SIGNATURE_BYTES + 1)
    except OSError as error:
        is_busy = isinstance(error, PermissionError) and READERS_BLOCK
        none = FileNotFoundError, PermissionError, IsADirectoryError
        if (isinstance(error, none) and not is_busy) or error.errno == errno.ELOOP:  # a symbolic link
            return b""
        raise  # the drive fails: there may be a key, which a new key must not replace
    # Windows' profiles are private.
    is_private = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
    return key if is_private and stat.S_ISREG(status.st_mode) and len(key) == SIGNATURE_BYTES else b""
