"""Store bytes by name where several machines reach them: in Redis, or in a folder on a network volume.

One worker at a time can claim a name; a claim ends when its worker releases it, or after `CLAIM_SECONDS`. Entries may come from
anybody: callers sign what they put, and verify what they get. Stores raise the errors of their clients; only
`without_secrets` may log one: the text of a client's exception can hold the URL, and the URL a password.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import random
import re
import uuid
from pathlib import Path
from typing import Any

from ..failures.describe import chain
from ..files import read_whole, remove_file, write_whole

SIGNATURE_BYTES = 32
# Timeouts of Redis: to connect; to send or receive an entry. Two attempts take less than shared.ANSWER_SECONDS: else, after an
# entry that was too large for the network, its request would still run, and the claim could not be released.
CONNECT_SECONDS, TRANSFER_SECONDS = 0.5, 2.0
# Files, drawn at random, whose age each worker checks: on a network volume each check takes milliseconds.
LOOKED_AT = 100
KEPT_SECONDS = 30 * 24 * 3600
# How long a worker may take to compile a graph before others compile it too.
CLAIM_SECONDS = 120
FOLDER, MARKER = "torch-compile-kit-shared", "about-this-folder.txt"
_ABOUT = "Torch Compile Kit for ComfyUI keeps compiled code here, and deletes what it wrote 30 days ago or earlier.\n"
_ENTRY = re.compile(r"[0-9a-f]{64}\.(entry|claim)|[0-9a-f]{32}\.tmp")
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


def signed(key: bytes, name: str, content: bytes) -> bytes:
    """An entry: an HMAC of its name and content, then the content."""
    return hmac.digest(key, name.encode() + b"\0" + content, "sha256") + content


def verified(key: bytes, name: str, entry: bytes) -> bytes | None:
    """The content of an entry; None if the entry was not `signed` with this key and name."""
    content = entry[SIGNATURE_BYTES:]
    return content if hmac.compare_digest(entry, signed(key, name, content)) else None


class RedisStore:
    def __init__(self, url: str):
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.refused: type[Exception] = redis.exceptions.ResponseError
        self._worker = uuid.uuid4().hex
        limits = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": TRANSFER_SECONDS}
        # One retry: the server or a firewall may have closed a connection that was idle.
        broken = [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError]
        self._client: Any = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 1), retry_on_error=broken, **limits)

    def get(self, name: str) -> bytes | None:
        return self._client.get(name)

    def put(self, name: str, entry: bytes) -> None:
        self._client.set(name, entry, ex=KEPT_SECONDS)

    def claim(self, name: str) -> bool:
        key, me = f"{name}:claim", self._worker
        # If the client has retried, its first attempt may have claimed the name, and only the answer was lost.
        return bool(self._client.set(key, me, nx=True, ex=CLAIM_SECONDS)) or self._client.get(key) == me.encode()

    def release(self, name: str) -> None:
        self._client.eval(_RELEASE, 1, f"{name}:claim", self._worker)


class FolderStore:
    """A subfolder of a folder that all workers can write, such as a network volume. Permissions do not matter. A symbolic link
    is refused, and a subfolder with other files but no marker. Ages are by the file server's clock, as this machine's may be
    wrong by days. An entry dated in the future counts as new, a claim dated in the future as expired."""

    refused: type[Exception] = OSError

    def __init__(self, place: str):
        self._folder, self._worker = Path(place, FOLDER), uuid.uuid4().hex
        self._folder.mkdir(parents=True, exist_ok=True)
        names = os.listdir(self._folder)
        foreign = MARKER not in names and any(_ENTRY.fullmatch(name) is None for name in names)
        if self._folder.resolve() != Path(place).resolve() / FOLDER or foreign:
            raise OSError(errno.EEXIST, f"{self._folder} holds something else; rename it, or choose another folder")
        if MARKER not in names:  # the subfolder is new, or the volume deletes old files
            (self._folder / MARKER).write_text(_ABOUT, encoding="utf-8")
        files = [self._folder / name for name in names if _ENTRY.fullmatch(name)]
        with contextlib.suppress(OSError):  # the volume may be read-only for this worker
            now = self._now()
            for file in random.Random().sample(files, min(LOOKED_AT, len(files))):
                if now - _written(file) > KEPT_SECONDS:
                    remove_file(file)

    def _now(self) -> float:
        probe = self._folder / f"{uuid.uuid4().hex}.tmp"
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            remove_file(probe)

    def _file(self, name: str, kind: str = "entry") -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.{kind}"

    def get(self, name: str) -> bytes | None:
        try:
            return read_whole(self._file(name))
        except FileNotFoundError:
            return None

    def put(self, name: str, entry: bytes) -> None:
        write_whole(self._file(name), entry)

    def claim(self, name: str) -> bool:
        claim = self._file(name, "claim")
        for _ in range(2):
            try:
                with claim.open("x") as file:
                    try:
                        file.write(self._worker)
                        file.flush()
                    except OSError:  # the volume is full
                        remove_file(claim)
                        raise
                return True
            except FileExistsError:
                if abs(self._now() - _written(claim)) <= CLAIM_SECONDS:
                    return False
                remove_file(claim)
        return True  # the claim has expired, but its file cannot be removed

    def release(self, name: str) -> None:
        claim = self._file(name, "claim")
        with contextlib.suppress(FileNotFoundError):
            if claim.read_text() == self._worker:
                remove_file(claim)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def without_secrets(error: BaseException) -> str:
    """Describe an error by its class and the system's message, without the text of a client's exception."""
    reasons = (cause.strerror for cause in chain(error) if isinstance(cause, OSError))
    return ": ".join([type(error).__name__, *[str(reason) for reason in reasons if reason][:1]])
