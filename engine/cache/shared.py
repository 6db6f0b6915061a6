"""Share compiled code between machines, through Redis or a folder, where PyTorch has its remote caches.

A worker that starts cold compiles for minutes what another has compiled. PyTorch can ask a server for a graph that is not on
disk (torch/_inductor/remote_cache.py), but it unpickles whatever comes, and waits for it as long as that takes. Here:

1. `configure` asks `shared_place` where the shared cache is, and for the key that signs entries. Without a key there is none.
2. `sharing` holds while the worker thread lowers a graph. PyTorch looks on disk, then calls `_Graphs.get`.
3. An entry begins with an HMAC of its name and content. If that differs, the entry is a miss, and nothing unpickles it. Else
   it is written to the group's folder too, where a restart finds it.
4. After a miss the worker claims the graph. If another holds the claim, `CompiledElsewhere` ends this attempt, and the job is
   tried again some seconds later; meanwhile the block runs uncompiled.
5. PyTorch compiles the graph and saves it, on disk and by `_Graphs.put`. Then the claim is released.

Names contain the group's folder, so entries depend on all that the local cache depends on (`environment`). Only the worker
thread talks to the server; an error turns sharing off for `OFF_SECONDS`. Not shared: what `lowered_inline` lowers.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hmac
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..log import logger
from ..torch_compat import private
from ..torch_settings import SharedScope, lowering_settings
from . import shared_place
from .disk import current
from .folders import read_json, write_json
from .shared_place import KEY
from .stores import CLAIM_SECONDS, FolderStore, RedisStore, without_secrets

# For what a store is asked: looking up a host's name, and a network volume that hangs, have no limit of their own.
ANSWER_SECONDS = 5.0
OFF_SECONDS = 60.0
# The choices of autotuning, which PyTorch writes beside a kernel's source (torch/_inductor/runtime/autotune_cache.py).
_TUNED = re.compile(r"[a-z0-9]+/[a-z0-9]+\.best_config")


class CompiledElsewhere(BaseException):
    """Another worker compiles this graph. PyTorch, through which this is raised, swallows exceptions of a remote cache."""


class SharedCache:
    """Signed entries in a store. Nothing here raises: an error is a miss.

    Args:
        place: for messages, without a password.
    """

    def __init__(self, place: str, key: bytes, connect: Callable[[], RedisStore | FolderStore]):
        self.place = place
        # Name -> when this process found that another compiles the graph.
        self.waiting_since: dict[str, float] = {}
        self._key, self._connect = key, connect
        self._store: RedisStore | FolderStore | None = None
        self._thread: threading.Thread | None = None
        self._off_until = self._read_only_until = 0.0
        self._warned: set[str] = set()

    def get(self, name: str) -> bytes | None:
        entry = self._try(lambda store: store.get(name))
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
        return bool(self._try(lambda store: store.put(name, entry) or True, writes=True))

    def claim(self, name: str) -> bool:
        """Whether no other worker holds the claim, as far as can be told."""
        return self._try(lambda store: store.claim(name), writes=True) is not False

    def release(self, name: str) -> None:
        self._try(lambda store: store.release(name), writes=True)

    def _sign(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self._key, f"torch-compile-kit 1\0{name}\0".encode() + content, "sha256")

    def _try(self, action: Callable[[Any], Any], writes: bool = False) -> Any:
        if time.monotonic() < max(self._off_until, self._read_only_until if writes else 0.0):
            return None
        try:
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


@dataclass
class _Sharing:
    """One graph that is being lowered.

    Args:
        names: what the names of its entries begin with.
        folder: the group's folder on disk.
        tuned: the choices of autotuning that the shared cache has; None: not asked for.
    """

    cache: SharedCache
    names: str
    folder: Path
    may_wait: bool
    claimed: str | None = None
    tuned: dict[str, dict] | None = None

    def get(self, name: str) -> bytes | None:
        if self.tuned is None:
            self._fetch_tuned()
        content = self.cache.get(name)
        if content is None and self.claimed is None:
            if self.cache.claim(name):
                self.claimed = name
                return self.cache.get(name)  # the worker that had the claim may have compiled the graph meanwhile
            if self.may_wait:
                since = self.cache.waiting_since.setdefault(name, time.monotonic())
                if time.monotonic() - since < CLAIM_SECONDS:
                    raise CompiledElsewhere(name)
        return content

    def _fetch_tuned(self) -> None:
        self.tuned = json.loads(self.cache.get(f"{self.names}:tuned") or "{}")
        for path, choice in self.tuned.items():
            file = self.folder / path
            if _TUNED.fullmatch(path) and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, choice)

    def close(self) -> None:
        if self.claimed is not None:
            self.cache.release(self.claimed)
        if self.tuned is not None:
            tuned = {file.relative_to(self.folder).as_posix(): read_json(file) for file in self.folder.glob("*/*.best_config")}
            if tuned.keys() - self.tuned.keys():
                self.cache.put(f"{self.names}:tuned", json.dumps(self.tuned | tuned).encode())


class _Graphs:
    """What PyTorch asks of a `RemoteCache`, for one of its two caches of graphs."""

    def __init__(self, sharing: _Sharing, kind: str, write_to_disk: Callable[[str, bytes], None]):
        self._sharing, self._names, self._write_to_disk = sharing, f"{sharing.names}:{kind}:", write_to_disk

    def get(self, key: str) -> dict | None:
        content = self._sharing.get(self._names + key)
        if content is None:
            return None
        self._write_to_disk(key, content)
        return {"data": base64.b64encode(content).decode("ascii")}

    def put(self, key: str, value: dict) -> None:
        self._sharing.cache.put(self._names + key, base64.b64decode(value["data"]))


class _Thread(threading.local):
    sharing: _Sharing | None = None


_thread = _Thread()
_functions = SharedScope({"fx": private.switch("fx_remote_cache"), "autograd": private.switch("autograd_remote_cache")})
_SWITCHES = {"fx_graph_remote_cache": True, "enable_remote_autograd_cache": True}


def _replaced(kind: str, write_to_disk: Callable[[str, bytes], None], is_users: object) -> Callable[[Callable], Any]:
    """In place of `get_remote_cache`; other threads get PyTorch's own cache, where the user has turned that on."""

    def wrapper(original: Callable) -> Any:
        def get_remote_cache() -> Any:
            if _thread.sharing is None:
                return original() if is_users else None
            return _Graphs(_thread.sharing, kind, write_to_disk)

        return staticmethod(get_remote_cache)

    return wrapper


@contextlib.contextmanager
def sharing(folder: str, may_wait: bool) -> Iterator[None]:
    """While a graph is lowered on this thread, after the group's `folder` was entered.

    PyTorch's settings are the same without a shared cache: the key of a graph on disk depends on one of them.

    Args:
        may_wait: raise `CompiledElsewhere` where another worker compiles the graph; else compile the graph here too.
    """
    if private.fx_remote_cache is None or private.autograd_remote_cache is None:
        yield
        return
    cache, disk, shared = _Configured.cache, current(), None
    if cache is not None and disk is not None:
        shared = _Sharing(cache, f"torch-compile-kit:{folder}", disk.root / folder, may_wait)
    fx = "fx", private.fx_write_to_disk, private.inductor_config.fx_graph_remote_cache
    autograd = "autograd", private.autograd_write_to_disk, private.functorch_config.enable_remote_autograd_cache
    _thread.sharing = shared
    try:
        with _functions.wrapping(fx=_replaced(*fx), autograd=_replaced(*autograd)), lowering_settings.applied(**_SWITCHES):
            yield
    finally:
        _thread.sharing = None
        if shared is not None:
            with contextlib.suppress(OSError):
                shared.close()
