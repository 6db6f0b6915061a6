"""Pack the compiled code of a model into one file, to copy to another machine of the same kind.

The file is a line that names the format, entries of the store (`code_store.packed`), and the sha256 of both. A file of
`torch.compiler.save_cache_artifacts` would lack what an earlier process compiled, C++ libraries, and a header to check.

The checks find damage and the wrong machine, not malice: the file holds code that will run (SECURITY.md).
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import TorchCompileKitError
from ..files import remove_leftovers, write_whole
from .code_store import NAME, STRUCTURE, CodeStore, packed, unpacked
from .environment import environment

# Not .safetensors, which stands for "no code inside".
SUFFIX = ".tckcache"
FORMAT = b"torch-compile-kit cache 7\n"
_UNREADABLE = ValueError, TypeError, LookupError, AttributeError, RecursionError


class CacheFileError(TorchCompileKitError):
    """Say why a cache file cannot be used, and what to do."""


@dataclass
class CacheFile:
    """The header of a cache file, and its entries by name."""

    models: list[str]
    sizes: list[str]
    entries: dict[str, bytes]
    choices: dict[str, dict[str, str]]


def write_cache_file(
    path: Path,
    store: CodeStore,
    names: Iterable[str],
    structures: Iterable[str],
    pack: str,
    models: list[str],
    sizes: list[str],
) -> int:
    """Pack the entries called `names` into a file; returns how many the store had.

    Args:
        path: replaced when it exists, in one step.
        structures: names under which choices for whole models are kept.
        pack: version of this pack, for people who look into the file.
    """
    entries = {name: content for name in sorted(names) if (content := store.read(name)) is not None}
    if not entries:
        raise CacheFileError(f"nothing of this model is in the cache folder {store.folder}; run Torch Compile Warmup before.")
    choices = {name: kept for name in structures if (kept := store.choices(name))}
    header = {"pack": pack, "environment": environment(), "models": models, "sizes": sizes, "choices": choices}
    data = FORMAT + packed(header, entries)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        write_whole(path, data + _digest(data))
    except OSError as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from error
    return len(entries)


def load_cache_file(path: Path, store: CodeStore) -> CacheFile:
    """Put the entries of a cache file into the store.

    Raises:
        CacheFileError: the file cannot be used, and the store is unchanged; or the store cannot be written.
    """
    try:
        with open(path, "rb") as file:  # read once: others could change the file after the check
            data = _checked(path, file)
        cache_file = _parsed(path.name, data)
    except OSError as error:
        raise CacheFileError(f"{path.name} cannot be read: {error}") from error
    except _UNREADABLE as error:  # the digest matches: not damaged, but not written by `write_cache_file`
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CacheFileError(
            f"{path.name} cannot be read as a file of Save Compile Cache. Do not use it. ({reason})"
        ) from error
    for name, content in cache_file.entries.items():
        if store.read(name) is None and not store.put(name, content):
            raise CacheFileError(f"{path.name} is not loaded: {store.folder} cannot be written; see the log.")
    for structure, choices in cache_file.choices.items():
        store.remember(structure, choices | store.choices(structure))
    return cache_file


def _checked(path: Path, file: BinaryIO) -> bytes:
    """The content of a file without format line and digest; raises CacheFileError if a check fails."""
    if (who := _others_who_could_write(path, file)) is not None:
        cure = f"run, if need be with sudo: chown {os.geteuid()} '{path}' && chmod go-w '{path}'"
        raise CacheFileError(f"{path} is not loaded: {who} could have written it. If it is as you have put it there, {cure}")
    if file.read(len(FORMAT)) != FORMAT:
        raise CacheFileError(
            f"{path.name} is no file of Save Compile Cache, of another version of it, or only a part of one. Copy it again, or "
            "choose another."
        )
    data = FORMAT + file.read()
    if _digest(data[:-64]) != data[-64:]:
        raise CacheFileError(f"{path.name} is damaged: its sha256 is not the one at its end. Copy it again.")
    return data[len(FORMAT) : -64]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _others_who_could_write(path: Path, file: BinaryIO) -> str | None:
    """Who else could have written the open file, or None: the file holds code, and any prompt may name it."""
    if not hasattr(os, "geteuid"):  # Windows' profiles are private
        return None
    status = os.fstat(file.fileno())
    by_group = status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid()  # Ubuntu gives each user a group
    if status.st_uid in (os.geteuid(), 0) and not by_group and not status.st_mode & stat.S_IWOTH:
        return None
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as private:
        if os.fstat(private.fileno()).st_mode & 0o077:  # a drive without permissions (WSL's /mnt, NTFS, SMB)
            return None
    return f"another user ({stat.filemode(status.st_mode)}, uid {status.st_uid})"


def _parsed(name: str, data: bytes) -> CacheFile:
    header, entries = unpacked(data)
    there = {key: header["environment"].get(key) for key in environment()}
    differing = [f"{k} is {v} here, {str(there[k])[:100]} in the file" for k, v in environment().items() if there[k] != v]
    if differing:
        raise CacheFileError(f"{name} was made for another machine: {'; '.join(differing)}. Save one on a machine like this.")
    for entry in entries:
        if not NAME.fullmatch(entry):
            raise CacheFileError(f"{name} holds {entry[:200]!r}, which is no compiled code. Do not use it.")
    choices = {key: {str(choice): str(value) for choice, value in kept.items()} for key, kept in header["choices"].items()}
    if not all(map(STRUCTURE.fullmatch, choices)):
        raise ValueError("its choices are for no model")
    models, sizes = ([str(text) for text in header[key]] for key in ("models", "sizes"))
    return CacheFile(models, sizes, entries, choices)
