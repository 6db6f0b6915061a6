"""Share compiled code between machines, through Redis or a folder.

1. `configure` reads where the shared cache is, and the key that signs entries. Without a key, sharing is off.
2. Only the worker thread asks the shared cache, for graphs whose code is not on disk (`CodeStore.get`). An entry whose HMAC (of
   name and content) differs is a miss. An error turns sharing off for `OFF_SECONDS`.
3. After a miss the worker claims the graph. If another machine holds the claim, the job is retried some seconds later;
   meanwhile the block runs uncompiled (compile_process/obtain.py).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import TorchCompileKitError
from ..files import status_of
from ..log import logger
from .stores import FolderStore, RedisStore, signed, verified, without_secrets

# Environment variables, and the files in the user's folder that are read if a variable is not set.
ADDRESS, KEY = "TORCH_COMPILE_KIT_SHARED_CACHE", "TORCH_COMPILE_KIT_SHARED_KEY"
FILES = {ADDRESS: "shared.address", KEY: "shared.key"}
SHORTEST_KEY = 16

# Timeout of a request: DNS and a network volume that hangs have none of their own.
ANSWER_SECONDS = 5.0
OFF_SECONDS = 60.0
PREFIX = "torch-compile-kit:"


class SharedCache:
    """Signed entries in a store. No method raises: an error is a miss. `place` is for messages, without a password."""

    def __init__(self, place: str, key: bytes, connect: Callable[[], RedisStore | FolderStore]):
        self.place = place
        self._key, self._connect = key, connect
        self._store: RedisStore | FolderStore | None = None
        self._request: Future | None = None  # the last request
        self._off_until = 0.0
        self._warned: set[str] = set()

    def get(self, name: str) -> bytes | None:
        entry = self._try(lambda store: store.get(PREFIX + name))
        if entry is None or (content := verified(self._key, name, entry)) is not None:
            return entry and content
        self._warn_once(
            "an entry of the shared cache %s is damaged or signed with another key: the code is compiled here instead. All "
            "machines must have the same %s",
            KEY,
        )
        return None

    def put(self, name: str, content: bytes) -> bool:
        """Put an entry; returns whether it is in the shared cache now."""
        entry = signed(self._key, name, content)
        return bool(self._try(lambda store: store.put(PREFIX + name, entry) or True, writes=True))

    def claim(self, name: str) -> bool:
        """Claim a graph; returns False if another worker holds the claim, as far as can be told."""
        return self._try(lambda store: store.claim(PREFIX + name), writes=True) is not False

    def release(self, name: str) -> None:
        """End a claim, even if sharing was turned off since: other workers would wait until the claim expires."""
        self._try(lambda store: store.release(PREFIX + name), writes=True, even_off=True)

    def _try(self, action: Callable[[Any], Any], writes: bool = False, even_off: bool = False) -> Any:
        if not even_off and time.monotonic() < self._off_until:
            return None
        try:
            return self._within_limit(lambda: action(self._connected()))
        except Exception as error:  # of any kind: sharing must not stop a compilation
            refused = () if self._store is None or isinstance(error, TimeoutError) else self._store.refused
            if writes and isinstance(error, refused):
                message = "the shared cache %s takes no entries (%s): code compiled here stays on this machine"
            else:
                self._off_until = time.monotonic() + OFF_SECONDS
                message = (
                    "the shared cache %s does not answer (%s): code is compiled here, and it is asked again after a minute"
                )
            self._warn_once(message, without_secrets(error))
            return None

    def _within_limit(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, which runs on its own thread, as it may hang; raises TimeoutError after ANSWER_SECONDS."""
        if self._request is not None and not self._request.done():
            raise TimeoutError("an earlier request is not over")
        request: Future[Any] = Future()

        def run() -> None:
            try:
                request.set_result(action())
            except BaseException as error:
                request.set_exception(error)

        threading.Thread(target=run, name="torch-compile-kit shared cache", daemon=True).start()
        self._request = request
        return request.result(ANSWER_SECONDS)

    def _connected(self) -> RedisStore | FolderStore:
        self._store = self._store or self._connect()
        return self._store

    def _warn_once(self, message: str, detail: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, self.place, detail)


class SharedCacheOff(TorchCompileKitError):
    """Say why there is no shared cache, without quoting what the user has typed."""


class _Configured:
    where: tuple = ()
    cache: SharedCache | None = None


def configured() -> SharedCache | None:
    return _Configured.cache


def configure(folder: Path) -> None:
    """Use the shared cache that the environment, or else files in `folder`, name; log why sharing is off. No setting of ComfyUI
    names the cache: web pages of other sites can write settings, and old files in the cache are deleted."""
    where = tuple((os.environ.get(variable), *_version_of(folder / file)) for variable, file in FILES.items())
    if where == _Configured.where:  # else the user may have fixed a file or its permissions, as the log asked
        return
    _Configured.where, _Configured.cache = where, None
    try:
        if place := _read(ADDRESS, folder).decode():
            _Configured.cache = _cache_at(place, _read(KEY, folder), folder)
    except (SharedCacheOff, OSError, ValueError) as error:
        reason = error if isinstance(error, SharedCacheOff) else without_secrets(error)
        logger.warning("the shared cache is off: %s", reason)


def _version_of(file: Path) -> tuple:
    status = status_of(file)
    return () if status is None else (status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid)


def _read(variable: str, folder: Path) -> bytes:
    text, file = os.environ.get(variable, "").strip().encode(), folder / FILES[variable]
    if not text and file.exists():
        status = file.stat()
        if hasattr(os, "geteuid") and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
            mode = stat.filemode(status.st_mode)
            cure = f"Make it yours alone, if need be with sudo: chown {os.geteuid()} {file} && chmod 600 {file}"
            raise SharedCacheOff(f"others may read or write {file} ({mode}, uid {status.st_uid}). {cure}")
        text = file.read_bytes().strip()
    return text


def _cache_at(place: str, key: bytes, folder: Path) -> SharedCache:
    name = place
    connect: Callable[[], RedisStore | FolderStore] = functools.partial(FolderStore, place)
    if not os.path.isabs(place):
        try:
            url = urlsplit(place)
            has_host = url.scheme in ("redis", "rediss") and bool(url.hostname) and url.port != 0
        except ValueError:  # its text quotes the password
            has_host = False
        # An unquoted "/", "?" or "#" in a password ends the URL's host part, and the text before would be taken for the host.
        if not has_host or "@" in url.path + url.query + url.fragment:
            raise SharedCacheOff(
                f"{ADDRESS} must be redis://user:password@host:6379/0 (rediss:// for TLS) or the path of a folder. In a "
                "password write %2F for /, %3F for ?, %23 for #, %40 for @, %3A for : and %25 for %."
            )
        if importlib.util.find_spec("redis") is None:
            raise SharedCacheOff("Python's client of Redis is missing. Install it with: python -m pip install redis")
        name, connect = f"{url.scheme}://{url.hostname}", functools.partial(RedisStore, place)
    if len(key) < SHORTEST_KEY:
        raise SharedCacheOff(
            f"entries are code and must be signed, but there is no key of {SHORTEST_KEY} characters or more. Give all machines "
            f"the same one (openssl rand -hex 32), as {KEY} or in {folder / FILES[KEY]} (mode 600)."
        )
    return SharedCache(name, key, connect)
