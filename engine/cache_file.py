"""One file with the compiled code of a model, to carry to another machine of the same kind.

A .safetensors file whose tensors are the files of the kinds' cache folders, as bytes. PyTorch's own
`torch.compiler.save_cache_artifacts` is not used: it holds all that the process has compiled, other packs' code too, nothing
of what an earlier process compiled, no compiled C++ of the CPU, and no header that could be checked before it is unpickled.

The checks find damage and the wrong machine, not malice: what is in such a file is code and runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .disk_cache import ABOUT, DiskCache, environment
from .errors import TorchCompileKitError

FORMAT = "torch-compile-kit cache 2"
# Triton's kernels are inside inductor's entries and are written out from there (torch/_inductor/triton_bundler.py), with the
# absolute paths of the machine in them; locks are empty.
LEFT_OUT = ("triton", "locks")
_MEMBER = re.compile(r"[0-9a-f]{12}(/[A-Za-z0-9_+=-][A-Za-z0-9._+=-]*)+")
_NO_DIGEST = "0" * 64


class CacheFileError(TorchCompileKitError):
    """A cache file cannot be used; the text says why and what to do."""


@dataclass
class CacheFile:
    """What the header of a cache file tells.

    Args:
        environment: see `disk_cache.environment`, of the machine that wrote it.
        pack: version of this pack.
        models: classes of the host's models.
        sizes: what they were compiled for.
        members: file below the cache folder -> sha256.
        modules: what tracing the blocks takes apart, see `prepare.traced_modules`.
    """

    environment: dict[str, str]
    pack: str
    models: list[str]
    sizes: list[str]
    members: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)


def write_cache_file(
    path: Path,
    cache: DiskCache,
    folders: Iterable[str],
    pack: str,
    models: list[str],
    sizes: list[str],
    modules: Iterable[str] = (),
) -> int:
    """Pack the folders of some kinds.

    Args:
        path: replaced when it exists, in one step.
        folders: names, see `CompiledKind.folder`.
        pack, models, sizes, modules: for the header.

    Returns:
        How many files are in it.

    Raises:
        CacheFileError: nothing has been compiled into these folders, or the file cannot be written.
    """
    members = {name: file.read_bytes() for name, file in _files(cache.root, folders)}
    if not any(not name.endswith(ABOUT) for name in members):
        raise CacheFileError(f"nothing of this model is in the cache folder {cache.root}; run Torch Compile Warmup before.")
    header = {
        "format": FORMAT,
        "sha256": _NO_DIGEST,
        "pack": pack,
        **environment(),
        "models": json.dumps(models),
        "sizes": json.dumps(sizes),
        "modules": json.dumps(list(modules)),
        "members": json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in members.items()}),
    }
    tensors = {
        n: torch.frombuffer(bytearray(d), dtype=torch.uint8) if d else torch.empty(0, dtype=torch.uint8)
        for n, d in members.items()
    }
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as made:
            partial = Path(made.name)
        save_file(tensors, partial, header)
        _write_digest(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return len(members)


def read_header(path: Path) -> CacheFile:
    """Check a cache file from end to end, and that it belongs to this machine.

    Raises:
        CacheFileError: it is damaged, of another kind, or made with other versions or for another GPU.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise CacheFileError(f"{path.name} is no readable .safetensors file, or only a part of one: {error}") from error
    if header.get("format") != FORMAT:
        raise CacheFileError(
            f"{path.name}: the format is {header.get('format')!r}, not {FORMAT!r}. Choose a file of Save Compile Cache."
        )
    if _digest(path, header.get("sha256", "")) != header.get("sha256"):
        raise CacheFileError(f"{path.name} is damaged: its sha256 is not the one in its header. Copy it again.")
    try:
        members = json.loads(header["members"])
        found = CacheFile(
            {name: header[name] for name in environment()},
            header["pack"],
            json.loads(header["models"]),
            json.loads(header["sizes"]),
            members,
            [name for name in json.loads(header["modules"]) if isinstance(name, str)],
        )
        if set(members) != names:
            raise ValueError("its list of members is another")
    except (KeyError, ValueError, TypeError) as error:
        raise CacheFileError(f"{path.name}: the header is incomplete: {error}") from error
    for name in members:
        if not _MEMBER.fullmatch(name):
            raise CacheFileError(f"{path.name} holds {name!r}, which is no file of a cache folder. Do not use it.")
    other = [
        f"{n} is {mine} here, {found.environment[n]} in the file"
        for n, mine in environment().items()
        if found.environment[n] != mine
    ]
    if other:
        raise CacheFileError(f"{path.name} was made for another machine: {'; '.join(other)}. Save one on a machine like this.")
    return found


def load_cache_file(path: Path, cache: DiskCache) -> CacheFile:
    """Unpack a cache file into the cache; files that are there already stay.

    Raises:
        CacheFileError: see `read_header`; or a member is damaged, or the cache folder cannot be written. The cache is
            unchanged then, save for members before the one that could not be written.
    """
    found = read_header(path)
    with safe_open(path, framework="pt") as file:
        contents = {name: file.get_tensor(name) for name in found.members}
    data = {}
    for name, tensor in contents.items():
        data[name] = tensor.numpy().tobytes() if tensor.dtype == torch.uint8 else b""
        if hashlib.sha256(data[name]).hexdigest() != found.members[name]:
            raise CacheFileError(f"{path.name} is damaged: {name} is not what the header says. Copy it again.")
    try:
        for name, content in data.items():
            _place(cache.root / name, content)
    except OSError as error:
        raise CacheFileError(f"the cache folder {cache.root} cannot be written: {error}") from error
    return found


def _files(root: Path, folders: Iterable[str]) -> list[tuple[str, Path]]:
    found = []
    for folder in sorted(set(folders)):
        for parent, inside, files in os.walk(root / folder):
            if Path(parent) == root / folder:
                inside[:] = [name for name in inside if name not in LEFT_OUT]
            for name in files:
                file = Path(parent) / name
                member = file.relative_to(root).as_posix()
                if _MEMBER.fullmatch(member) and not file.is_symlink() and not name.endswith((".lock", ".tmp")):
                    found.append((member, file))
    return sorted(found)


def _place(file: Path, content: bytes) -> None:
    """Whole or not at all: another process may be reading."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:
        made.write(content)
    os.replace(made.name, file)


def _digest(path: Path, declared: str) -> str:
    """sha256 of the whole file, with zeros where the header declares it."""
    data = path.read_bytes()
    if len(declared) == len(_NO_DIGEST):
        data = data.replace(declared.encode(), _NO_DIGEST.encode(), 1)
    return hashlib.sha256(data).hexdigest()


def _write_digest(path: Path) -> None:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    path.write_bytes(data.replace(_NO_DIGEST.encode(), digest.encode(), 1))
