"""Read where the shared cache is, and the key that signs its entries: from the environment, else from files of the user's.

Never from a setting of ComfyUI's page: pages of other sites can write those, and old files are deleted in that place.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import TorchCompileKitError
from .stores import FolderStore, RedisStore, without_secrets

# Variables, and the files in the user's folder that count without them.
ADDRESS, KEY = "TORCH_COMPILE_KIT_SHARED_CACHE", "TORCH_COMPILE_KIT_SHARED_KEY"
FILES = {ADDRESS: "shared.address", KEY: "shared.key"}
SHORTEST_KEY = 16


class SharedCacheOff(TorchCompileKitError):
    """Say why there is no shared cache, without quoting what the user has typed."""


def state(folder: Path) -> tuple:
    """Something that changes when `read` may answer otherwise: the log may ask to write a file, or to close it to others."""
    return tuple((os.environ.get(variable), *_version_of(folder / file)) for variable, file in FILES.items())


def _version_of(file: Path) -> tuple:
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid


def read(folder: Path) -> tuple[str, bytes, Callable[[], RedisStore | FolderStore]] | None:
    """The place as messages name it, the key, and a function that connects; None if the user has named no place.

    Raises:
        SharedCacheOff: what is wrong, and what to do.
    """
    try:
        place = _read(ADDRESS, folder).decode()
        if not place:
            return None
        key = _read(KEY, folder)
        name, connect = _store_at(place)
    except (OSError, ValueError) as error:
        raise SharedCacheOff(without_secrets(error)) from None
    if len(key) < SHORTEST_KEY:
        raise SharedCacheOff(
            f"entries are code and must be signed, but there is no key of {SHORTEST_KEY} characters or more. Give all machines "
            f"the same one (openssl rand -hex 32), as {KEY} or in {folder / FILES[KEY]} (mode 600)."
        )
    return name, key, connect


def _read(variable: str, folder: Path) -> bytes:
    text, file = os.environ.get(variable, "").strip().encode(), folder / FILES[variable]
    if not text and file.exists():
        status = file.stat()
        if hasattr(os, "geteuid") and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            mode = stat.filemode(status.st_mode)
            raise SharedCacheOff(f"others may read or write {file} ({mode}). Close it with: chmod 600 {file}")
        text = file.read_bytes().strip()
    return text


def _store_at(place: str) -> tuple[str, Callable[[], RedisStore | FolderStore]]:
    if os.path.isabs(place):
        return place, lambda: FolderStore(place)
    try:
        url = urlsplit(place)
        has_host = url.scheme in ("redis", "rediss") and bool(url.hostname) and url.port != 0
    except ValueError:  # it quotes the password
        has_host = False
    # In a password "/", "?" and "#" end the part of the host, and what stands before them would pass for the host.
    if not has_host or "@" in url.path + url.query + url.fragment:
        raise SharedCacheOff(
            f"{ADDRESS} must be redis://user:password@host:6379/0 (rediss:// for TLS) or the path of a folder. In a password "
            "write %2F for /, %3F for ?, %23 for #, %40 for @, %3A for : and %25 for %."
        )
    if importlib.util.find_spec("redis") is None:
        raise SharedCacheOff("Python's client of Redis is missing. Install it with: python -m pip install redis")
    return f"{url.scheme}://{url.hostname}", lambda: RedisStore(place)
