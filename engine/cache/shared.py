"""Share compiled code between machines, through Redis or a folder.

A worker that starts cold compiles for minutes what another has compiled.

1. `configure` asks `shared_place` where the shared cache is, and for the key that signs entries. Without a key there is none.
2. The worker thread asks for a graph that is not kept here (`CodeStore.get`). An entry begins with an HMAC of its name and
   content. If that differs, the entry is a miss, and nothing is loaded from it.
3. After a miss the worker claims the graph. If another holds the claim, the job is tried again some seconds later; meanwhile
   the block runs uncompiled (compile_process/obtain.py).

Names are those of the local store, so entries depend on all that the local cache depends on. Only the worker thread talks to
the server; an error turns sharing off for `OFF_SECONDS`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..log import logger
from . import shared_place
from .environment import environment
from .shared_place import KEY
from .stores import FolderStore, RedisStore, without_secrets

# For what a store is asked: looking up a host's name, and a network volume that hangs, have no limit of their own.
ANSWER_SECONDS = 5.0
OFF_SECONDS = 60.0
PREFIX = "torch-compile-kit:"


class SharedCache:
    """Signed entries in a store. Nothing here raises: an error is a miss.

    Args:
        place: for messages, without a password.
    """

    def __init__(self, place: str, key: bytes, connect: Callable[[], RedisStore | FolderStore]):
        self.place = place
        # Name -> when this process noticed that another compiles the graph.
        self.waiting_since: dict[str, float] = {}
        self._key, self._connect = key, connect
        self._store: RedisStore | FolderStore | None = None
        self._thread: threading.Thread | None = None
        self._off_until = self._read_only_until = 0.0
        self._warned: set[str] = set()
        self._asking = threading.Lock()
        self._has_told = False

    def has_current(self) -> bool:
        """Whether a worker has put code of these versions there, as far as can be told within `ANSWER_SECONDS`."""
        return self.get(_name_of_versions()) is not None

    def get(self, name: str) -> bytes | None:
        entry = self._try(lambda store: store.get(PREFIX + name))
        if entry is None or hmac.compare_digest(entry[:32], self._sign(name, entry[32:])):
            return entry and entry[32:]
        self._warn_once(
            "an entry of the shared cache %s is damaged or signed with another key: the code is compiled here instead. All "
            "machines must have the same %s",
            KEY,
        )
        return None

    def put(self, name: str, content: bytes) -> bool:
        """Whether the entry is in the shared cache now."""
        entry = self._sign(name, content) + content
        is_there = bool(self._try(lambda store: store.put(PREFIX + name, entry) or True, writes=True))
        if is_there and not self._has_told:
            self._has_told = True
            self.put(_name_of_versions(), b"")
        return is_there

    def claim(self, name: str) -> bool:
        """Whether no other worker holds the claim, as far as can be told."""
        return self._try(lambda store: store.claim(PREFIX + name), writes=True) is not False

    def release(self, name: str) -> None:
        self._try(lambda store: store.release(PREFIX + name), writes=True)

    def _sign(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, f"torch-compile-kit 1\0{name}\0".encode() + content, "sha256")

    def _try(self, action: Callable[[Any], Any], writes: bool = False) -> Any:
        if time.monotonic() < max(self._off_until, self._read_only_until if writes else 0.0):
            return None
        try:
            with self._asking:
                return self._within_limit(lambda: action(self._connected()))
        except Exception as error:  # of whatever kind: it must not stop a compilation
            reason, until = without_secrets(error), time.monotonic() + OFF_SECONDS
            if writes and self._store is not None and isinstance(error, self._store.refused):
                self._read_only_until = until
                self._warn_once("the shared cache %s takes no entries (%s): code compiled here stays on this machine", reason)
            else:
                self._off_until = until
                message = (
                    "the shared cache %s does not answer (%s): code is compiled here, and it is asked again after a minute"
                )
                self._warn_once(message, reason)
            return None

    def _within_limit(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, on a thread of its own: the caller holds a lock that the sampler may wait for."""
        if self._thread is not None and self._thread.is_alive():
            raise TimeoutError(errno.ETIMEDOUT, "an earlier request is not over")
        results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((action(), None))
            except Exception as error:
                results.put((None, error))

        self._thread = threading.Thread(target=run, name="torch-compile-kit shared cache", daemon=True)
        self._thread.start()
        try:
            result, error = results.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {ANSWER_SECONDS} s") from None
        self._thread.join()
        if error is not None:
            raise error
        return result

    def _connected(self) -> RedisStore | FolderStore:
        self._store = self._store or self._connect()
        return self._store

    def _warn_once(self, message: str, detail: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, self.place, detail)


def _name_of_versions() -> str:
    return hashlib.sha256(json.dumps(environment(), sort_keys=True).encode()).hexdigest()


class _Configured:
    where: tuple = ()
    cache: SharedCache | None = None


def configure(folder: Path) -> None:
    """Use the shared cache that the environment or files in `folder` name; say in the log why if that is off."""
    where = shared_place.state(folder)
    if where != _Configured.where:
        _Configured.where, _Configured.cache = where, None
        try:
            if opened := shared_place.read(folder):
                _Configured.cache = SharedCache(*opened)
        except shared_place.SharedCacheOff as error:
            logger.warning("the shared cache is off: %s", error)


def configured() -> SharedCache | None:
    return _Configured.cache
