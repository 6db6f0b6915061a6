"""Pack the compiled code of a model into one file, to carry to another machine of the same kind.

The file is an uncompressed zip of the store's entries, without their signatures, and a header; its comment, the last bytes, is
the sha256 of all bytes before. A file of `torch.compiler.save_cache_artifacts` would hold the code of other packs too, nothing
that an earlier process compiled, no compiled C++ of the CPU, and no header that could be checked before it is unpickled.

The checks find damage and the wrong machine, not malice: what is in such a file is code and runs (SECURITY.md).
"""

import hashlib
import io
import json
import os
import re
import struct
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import TorchCompileKitError
from ..files import remove_file, replace
from .code_store import CODE, LEFTOVER_SECONDS, NAME, STRUCTURE, CodeStore
from .environment import environment

FORMAT = "torch-compile-kit cache 5"
HEADER = "header.json"
MAX_HEADER = 64 * 1024**2
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_NO_DIGEST = b"0" * 64
_UNREADABLE = (
    zipfile.BadZipFile, struct.error, EOFError,
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError,
)  # fmt: skip


class CacheFileError(TorchCompileKitError):
    """Say why a cache file cannot be used, and what to do."""


@dataclass
class CacheFile:
    """The header of a cache file, and the names of its entries."""

    environment: dict[str, str]
    models: list[str]
    sizes: list[str]
    names: list[str]
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
    """Pack entries of the store.

    Args:
        path: replaced when it exists, in one step.
        names: of entries.
        structures: names under which choices for whole models are kept.
        pack: version of this pack, for people who look into the file.

    Returns:
        How many graphs are in it.
    """
    contents = {name: content for name in sorted(names) if (content := store.read(name)) is not None}
    if not contents:
        raise CacheFileError(f"nothing of this model is in the cache folder {store.folder}; run Torch Compile Warmup before.")
    choices = {name: kept for name in structures if (kept := store.choices(name))}
    header = {"format": FORMAT, "pack": pack, **environment(), "models": models, "sizes": sizes, "choices": choices}
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="torch-compile-kit-", suffix=".partial", delete=False) as out:
            partial = Path(out.name)
            out.write(_packed(contents, header))
        replace(partial, path)
    except OSError as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from error
    finally:
        if partial is not None:
            remove_file(partial)
    return len(contents)


def _packed(contents: dict[str, bytes], header: Mapping[str, object]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", strict_timestamps=False) as archive:
        for name, content in contents.items():
            archive.writestr(f"{name}{CODE}", content)
        archive.writestr(HEADER, json.dumps(header, indent=1))
        archive.comment = _NO_DIGEST
    packed = data.getvalue()[: -len(_NO_DIGEST)]
    return packed + hashlib.sha256(packed).hexdigest().encode()


def load_cache_file(path: Path, store: CodeStore) -> CacheFile:
    """Put the entries of a cache file into the store.

    Raises:
        CacheFileError: the store is unchanged then, or could not be written.
    """
    try:
        data = _checked(path)
    except OSError as error:
        raise CacheFileError(f"{path.name} cannot be read: {error}") from error
    with _refusing(path.name), zipfile.ZipFile(io.BytesIO(data)) as archive:
        header = _read_header(archive, path.name, len(data))
        contents = {name: archive.read(f"{name}{CODE}") for name in header.names}
    for name, content in contents.items():
        if store.read(name) is None and not store.put(name, content):
            raise CacheFileError(f"{path.name} is not loaded: {store.folder} cannot be written; see the log.")
    for structure, choices in header.choices.items():
        store.add_choices(structure, choices | store.choices(structure))
    return header


def _remove_leftovers(folder: Path) -> None:
    """What a process had not finished when it was killed, an hour ago or earlier."""
    for file in folder.glob("torch-compile-kit-*.partial"):
        with suppress(OSError):
            if time.time() - file.lstat().st_mtime > LEFTOVER_SECONDS:
                remove_file(file)


def _checked(path: Path) -> bytes:
    """What is in a file, read once: on a drive that keeps no rights others could change the file after it was checked."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(_NO_DIGEST)))
        if not _DIGEST.fullmatch(file.read()):
            raise CacheFileError(
                f"{path.name} is no file of Save Compile Cache, or only a part of one. Copy it again, or choose another."
            )
        file.seek(0)
        data = file.read()
    if hashlib.sha256(memoryview(data)[: -len(_NO_DIGEST)]).hexdigest().encode() != data[-len(_NO_DIGEST) :]:
        raise CacheFileError(f"{path.name} is damaged: its sha256 is not the one at its end. Copy it again.")
    return data


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn any error of reading the file into a refusal: its digest fits, so the file is not damaged but of another origin."""
    try:
        yield
    except _UNREADABLE as error:
        if isinstance(error, CacheFileError):
            raise
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CacheFileError(f"{name} cannot be read as a file of Save Compile Cache. Do not use it. ({reason})") from error


def _read_header(archive: zipfile.ZipFile, name: str, size: int) -> CacheFile:
    listed = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in listed):
        raise ValueError("members are compressed or encrypted")
    if sum(info.file_size for info in listed) > size or archive.getinfo(HEADER).file_size > MAX_HEADER:
        raise ValueError("members are larger than the file")
    header = json.loads(archive.read(HEADER))
    if header.get("format") != FORMAT:
        other = str(header.get("format"))[:100]
        raise CacheFileError(f"{name}: the format is {other!r}, not {FORMAT!r}. Choose a file of Save Compile Cache.")
    machine = {key: header[key] for key in environment()}
    models, sizes = header["models"], header["sizes"]
    if not isinstance(models, list) or not isinstance(sizes, list):
        raise TypeError("no list where a list should be")
    if not all(isinstance(value, str) for value in (*machine.values(), *models, *sizes)):
        raise TypeError("no text where text should be")
    members = [info.filename for info in listed if info.filename != HEADER]
    if len({*members, HEADER}) != len(listed):
        raise ValueError("a member is in the file twice")
    for member in members:
        if not NAME.fullmatch(member.removesuffix(CODE)) or not member.endswith(CODE):
            raise CacheFileError(f"{name} holds {member[:200]!r}, which is no compiled code. Do not use it.")
    choices = header["choices"]
    if not all(STRUCTURE.fullmatch(key) and all(map(_is_text, kept.items())) for key, kept in choices.items()):
        raise TypeError("no choices where choices should be")
    here = environment()
    values = [f"{key} is {here[key]} here, {machine[key][:100]} in the file" for key in here if machine[key] != here[key]]
    if values:
        raise CacheFileError(f"{name} was made for another machine: {'; '.join(values)}. Save one on a machine like this.")
    return CacheFile(machine, models, sizes, [member.removesuffix(CODE) for member in members], choices)


def _is_text(item: tuple) -> bool:
    return all(isinstance(part, str) for part in item)
