"""Pack the compiled code of a model into one file, to carry to another machine of the same kind.

The file is an uncompressed zip of the groups' cache folders and a header; its comment, the last bytes, is the sha256 of all
bytes before. A file of `torch.compiler.save_cache_artifacts` would hold the code of other packs too, nothing that an earlier
process compiled, no compiled C++ of the CPU, and no header that could be checked before it is unpickled.

The checks find damage and the wrong machine, not malice: what is in such a file is code and runs (SECURITY.md).
"""

import hashlib
import json
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import TorchCompileKitError
from ..files import replace
from .disk import ABOUT, DiskCache
from .environment import environment
from .folders import make_private, remove, remove_leftovers

FORMAT = "torch-compile-kit cache 4"
FORMATS = ("torch-compile-kit cache 3", FORMAT)  # 3 also has a digest of each member
HEADER = "header.json"
MAX_HEADER = 64 * 1024**2
# Triton's kernels are inside inductor's entries and are written out from there (torch/_inductor/triton_bundler.py), with the
# absolute paths of the machine in them; locks are empty.
LEFT_OUT = ("triton", "locks")
_MEMBER = re.compile(r"[0-9a-f]{12}(/[A-Za-z0-9_+=-][A-Za-z0-9._+=-]*)+")
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_NO_DIGEST = b"0" * 64
_CHUNK = 1024**2
_UNREADABLE = (
    zipfile.BadZipFile, struct.error, EOFError,
    RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError,
)  # fmt: skip


class CacheFileError(TorchCompileKitError):
    """Say why a cache file cannot be used, and what to do."""


@dataclass
class CacheFile:
    """The header of a cache file, and the paths of its members below the cache folder."""

    environment: dict[str, str]
    models: list[str]
    sizes: list[str]
    members: list[str]


def write_cache_file(
    path: Path, cache: DiskCache, folders: Iterable[str], pack: str, models: list[str], sizes: list[str]
) -> int:
    """Pack the folders of some groups, a piece at a time: the file can be larger than the memory that is left.

    Args:
        path: replaced when it exists, in one step.
        folders: names, see `BlockGroup.folder`.
        pack: version of this pack, for people who look into the file.

    Returns:
        How many files are in it.
    """
    files = _files(cache.root, folders)
    if not any(not name.endswith(ABOUT) for name, _ in files):
        raise CacheFileError(f"nothing of this model is in the cache folder {cache.root}; run Torch Compile Warmup before.")
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent.glob("torch-compile-kit-*.partial"))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="torch-compile-kit-", suffix=".partial", delete=False) as out:
            partial = Path(out.name)
            with zipfile.ZipFile(out, "w", strict_timestamps=False) as archive:
                for name, file in files:
                    _pack(archive, name, file)
                header = {"format": FORMAT, "pack": pack, **environment(), "models": models, "sizes": sizes}
                archive.writestr(HEADER, json.dumps(header, indent=1))
                archive.comment = _NO_DIGEST
        _write_digest(partial)
        replace(partial, path)
    except OSError as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return len(files)


def load_cache_file(path: Path, cache: DiskCache) -> CacheFile:
    """Unpack a cache file into the cache; files that are there already stay.

    Raises:
        CacheFileError: the cache is unchanged then, save for members before the one that could not be written.
    """
    incoming = None
    try:
        with open(path, "rb") as file:
            _check_digest(file, path.name)
            with _refusing(path.name), zipfile.ZipFile(file) as archive:
                header = _read_header(archive, path)
                make_private(cache.root)
                incoming = Path(tempfile.mkdtemp(dir=cache.root, prefix="incoming-"))
                archive.extractall(incoming, header.members)
        for name in header.members:
            if not (cache.root / name).exists():
                make_private(cache.root / name.partition("/")[0])
                (cache.root / name).parent.mkdir(parents=True, exist_ok=True)
                replace(incoming / name, cache.root / name)
        cache.loaded({name.partition("/")[0] for name in header.members})
    except OSError as error:
        raise CacheFileError(f"{path.name} cannot be read, or the cache folder {cache.root} not written: {error}") from error
    finally:
        if incoming is not None:
            remove(incoming)
    return header


def _check_digest(file: BinaryIO, name: str) -> None:
    digest, declared = _digest(file)
    if not _DIGEST.fullmatch(declared):
        raise CacheFileError(
            f"{name} is no file of Save Compile Cache, or only a part of one. Copy it again, or choose another."
        )
    if digest != declared:
        raise CacheFileError(f"{name} is damaged: its sha256 is not the one at its end. Copy it again.")


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


def _read_header(archive: zipfile.ZipFile, path: Path) -> CacheFile:
    listed = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in listed):
        raise ValueError("members are compressed or encrypted")
    if sum(info.file_size for info in listed) > path.stat().st_size or archive.getinfo(HEADER).file_size > MAX_HEADER:
        raise ValueError("members are larger than the file")
    header = json.loads(archive.read(HEADER))
    if header.get("format") not in FORMATS:
        other = str(header.get("format"))[:100]
        raise CacheFileError(f"{path.name}: the format is {other!r}, not {FORMAT!r}. Choose a file of Save Compile Cache.")
    machine = {name: header[name] for name in environment()}
    models, sizes = header["models"], header["sizes"]
    if not isinstance(models, list) or not isinstance(sizes, list):
        raise TypeError("no list where a list should be")
    if not all(isinstance(value, str) for value in (*machine.values(), *models, *sizes)):
        raise TypeError("no text where text should be")
    members = [info.filename for info in listed if info.filename != HEADER]
    if len({*members, HEADER}) != len(listed):
        raise ValueError("a member is in the file twice")
    for name in members:
        if not _MEMBER.fullmatch(name):
            raise CacheFileError(f"{path.name} holds {name[:200]!r}, which is no file of a cache folder. Do not use it.")
    here = environment()
    values = [f"{key} is {here[key]} here, {machine[key][:100]} in the file" for key in here if machine[key] != here[key]]
    if values:
        raise CacheFileError(f"{path.name} was made for another machine: {'; '.join(values)}. Save one on a machine like this.")
    return CacheFile(machine, models, sizes, members)


def _files(root: Path, folders: Iterable[str]) -> list[tuple[str, Path]]:
    members = []
    for folder in sorted(set(folders)):
        for parent, inside, files in os.walk(root / folder):
            if Path(parent) == root / folder:
                inside[:] = [name for name in inside if name not in LEFT_OUT]
            for name in files:
                file = Path(parent) / name
                member = file.relative_to(root).as_posix()
                if _MEMBER.fullmatch(member) and not file.is_symlink() and not name.endswith((".lock", ".tmp")):
                    members.append((member, file))
    return sorted(members)


def _pack(archive: zipfile.ZipFile, name: str, file: Path) -> None:
    try:
        archive.write(file, name)
    except FileNotFoundError as error:
        raise CacheFileError(
            f"{file} is gone: the cache was cleared while it was saved. Run Torch Compile Warmup and this node again."
        ) from error


def _digest(file: BinaryIO) -> tuple[bytes, bytes]:
    """The sha256 of all but the end of a file, and the end, which should be the same."""
    left = file.seek(0, os.SEEK_END) - len(_NO_DIGEST)
    digest = hashlib.sha256()
    file.seek(0)
    while left > 0:
        chunk = file.read(min(_CHUNK, left)) or bytes(left)  # what is cut off meanwhile does not fit
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode(), file.read()


def _write_digest(path: Path) -> None:
    with open(path, "r+b") as file:
        digest, _ = _digest(file)
        file.seek(-len(_NO_DIGEST), os.SEEK_END)
        file.write(digest)
