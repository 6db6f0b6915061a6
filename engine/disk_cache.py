"""A lasting place for what inductor writes: compiled graphs, kernels, the choices of autotuning.

PyTorch's own is in the system's temp folder, one for all. Here each kind of block has a folder: it is inductor's folder while a
block of the kind compiles, and only then, so that the plain `torch.compile` of others keeps its own; the folders that were not
used for longest go first when all are too large; and one model's can be packed into a file (`cache_file.py`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from .inductor import version
from .scopes import folder_scope

logger = logging.getLogger("torch-compile-kit")
LIMIT = "TORCH_COMPILE_KIT_CACHE_GIB"
DEFAULT_GIB = 2.0
ABOUT = "about.json"
CHOICES = "choices.json"
# Another ComfyUI may be compiling into a folder of the same user.
IN_USE_SECONDS = 600
_lock = threading.RLock()


@dataclass
class DiskCache:
    """The folders of all kinds below one root.

    Args:
        root: made when missing.
        limit: bytes that all folders may have together.
    """

    root: Path
    limit: int

    def __post_init__(self) -> None:
        self._compiling: dict[str, int] = {}

    def enter(self, name: str, block: str) -> None:
        """Make the folder `name` the one that inductor and Triton use, until `exit`.

        Args:
            block: class of the blocks, for people who look into the folder.
        """
        folder = self.root / name
        with _lock:
            self._compiling[name] = self._compiling.get(name, 0) + 1
            variables = {"inductor_folder": str(folder)}
            if users_triton_folder() is None:
                variables["triton_folder"] = str(folder / "triton")
            try:
                self._make(name, block)
            except OSError as error:  # removed or full since it was opened: compiling itself must not fail over that
                logger.warning("the cache folder %s cannot be written (%s)", folder, error)
                variables = {}
            folder_scope.enter(**variables)

    def exit(self, name: str) -> None:
        with _lock:
            self._compiling[name] -= 1
            if not self._compiling[name]:
                del self._compiling[name]
            folder_scope.exit()

    def recall(self, name: str, key: str) -> str | None:
        """What `remember` has kept, in this process or an earlier one."""
        return _read_json(self.root / name / CHOICES).get(key)

    def remember(self, name: str, owner: str, key: str, value: str) -> None:
        """Keep a choice that compiled code depends on, so that the next process makes the same.

        Args:
            name: of the folder; it travels and goes like those of kinds.
            owner: class it is about, for people who look into the folder.
        """
        try:
            self._make(name, owner)
            file = self.root / name / CHOICES
            file.write_text(json.dumps(_read_json(file) | {key: value}), encoding="utf-8")
        except OSError as error:
            logger.warning("%s is not kept in %s: %s", value, self.root, error)

    def _make(self, name: str, owner: str) -> None:
        """The folder, used now."""
        about = self.root / name / ABOUT
        about.parent.mkdir(parents=True, exist_ok=True)
        if not about.exists():
            about.write_text(json.dumps({"class": owner, **environment()}, indent=1), encoding="utf-8")
        os.utime(about)

    def folders(self) -> list[Path]:
        """Those of kinds, least recently used first."""
        found = [about.parent for about in self.root.glob(f"*/{ABOUT}")]
        return sorted(found, key=_last_used)

    def has_current(self) -> bool:
        """Whether one was made by the same versions on the same device."""
        now = environment().items()
        return any(now <= _read_json(folder / ABOUT).items() for folder in self.folders())

    def size(self) -> int:
        """Bytes of all folders."""
        return sum(map(_size, self.folders()))

    def trim(self) -> int:
        """Remove the least recently used folders until the rest is within the limit.

        Never one that is being compiled into, here or (used in the last ten minutes) by another process.

        Returns:
            How many bytes were removed.
        """
        with _lock:
            sizes = {folder: _size(folder) for folder in self.folders()}
            total = excess = sum(sizes.values())
            for folder, size in sizes.items():
                if total <= self.limit:
                    break
                if folder.name not in self._compiling and time.time() - _last_used(folder) > IN_USE_SECONDS:
                    total -= size - _remove(folder)
            if total != excess:
                logger.info("compile cache: %d MiB removed, %d MiB kept in %s", (excess - total) >> 20, total >> 20, self.root)
            return excess - total

    def clear(self) -> int:
        """Remove everything but what is being compiled into; compiled code in memory goes on working.

        Returns:
            How many bytes were removed.
        """
        with _lock:
            before = self.size()
            for folder in self.folders():
                if folder.name not in self._compiling:
                    _remove(folder)
            return before - self.size()

    def usage(self) -> dict:
        """For the page and for scripts."""
        entries = [{"name": f.name, "bytes": _size(f), **_read_json(f / ABOUT)} for f in reversed(self.folders())]
        return {
            "folder": str(self.root),
            "bytes": sum(entry["bytes"] for entry in entries),
            "limit": self.limit,
            "entries": entries,
        }


class _Current:
    """The cache of this process; None until the host names a folder, or when that cannot be written."""

    cache: DiskCache | None = None
    opened = False


def current() -> DiskCache | None:
    """The cache in use, if there is one."""
    return _Current.cache


def open_cache(folder: Path) -> DiskCache | None:
    """Use `folder` from now on; where the user has named one by TORCHINDUCTOR_CACHE_DIR, a folder in that.

    Only the first call has an effect. A folder that cannot be written is said in the log, and PyTorch's own place is used.
    """
    with _lock:
        if not _Current.opened:
            _Current.opened = True
            users = users_folder()
            root = Path(users) / "torch-compile-kit" if users else folder
            try:
                root.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=root):
                    pass
                _Current.cache = DiskCache(root, limit_in_bytes())
            except OSError as error:
                logger.warning(
                    "the folder %s cannot be written (%s): compiled code goes to the system's temp folder and may be lost at "
                    "the next restart",
                    root,
                    error,
                )
        return _Current.cache


def limit_in_bytes() -> int:
    """The size limit: TORCH_COMPILE_KIT_CACHE_GIB, else 2 GiB."""
    given = os.environ.get(LIMIT, "")
    try:
        gib = float(given or DEFAULT_GIB)
        if not 0 <= gib < float("inf"):
            raise ValueError
    except ValueError:
        logger.warning("%s = %r: not a number of GiB; %g is used", LIMIT, given, DEFAULT_GIB)
        gib = DEFAULT_GIB
    return int(gib * 1024**3)


def users_folder() -> str | None:
    """What the user has set TORCHINDUCTOR_CACHE_DIR to; PyTorch sets it to its default itself."""
    value = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return value if value and Path(value) != Path(default_cache_dir()) else None


def users_triton_folder() -> str | None:
    """What the user has set TRITON_CACHE_DIR to; inductor sets it to a folder in its own (triton_heuristics.py)."""
    value = os.environ.get("TRITON_CACHE_DIR")
    return value if value and Path(cache_dir()) not in Path(value).parents else None


@functools.cache
def environment() -> dict[str, str]:
    """What compiled code depends on beside the model: another value of any of them is another cache."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        "python": ".".join(map(str, sys.version_info[:2])),
        "platform": f"{sys.platform} {platform.machine()}",
        "device": torch.cuda.get_device_name() if gpu else f"CPU {torch.backends.cpu.get_cpu_capability()}",
        "comfy-kitchen": _version_of("comfy-kitchen"),
        "code of the pack": version(),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def folder_name(block: str, structure: tuple) -> str:
    """A short name (paths are limited on Windows), the same in every process.

    Args:
        block: class of the blocks.
        structure: see `structure.structure_of`. What differs beyond it, inductor tells apart in its own keys; modules are
            left out, since custom packs are named by the folder they are in.
    """
    layers, *tensors = structure
    layers = tuple((name, *rest) for name, _module, *rest in layers)
    text = json.dumps([environment(), block, layers, tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _last_used(folder: Path) -> float:
    try:
        return (folder / ABOUT).stat().st_mtime
    except OSError:
        return 0.0


def _read_json(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _size(folder: Path) -> int:
    total = 0
    for parent, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _remove(folder: Path) -> int:
    """Remove it; what the system holds on to (loaded code on Windows) stays, and its size is returned."""
    shutil.rmtree(folder, ignore_errors=True)
    return _size(folder)
