"""Keep what inductor writes (compiled graphs, kernels, the choices of autotuning) in a folder for each block group.

Inductor writes to a group's folder only while a block of the group compiles, so that the plain `torch.compile` of others keeps
PyTorch's folder. When all folders together are too large, the least recently used are removed.
"""

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..log import logger
from ..threads import started
from ..torch_settings import folder_scope
from .environment import FOLDER, KIT, environment, limit_in_bytes, users_folder, users_triton_folder
from .folders import (
    IN_GROUP,
    KIND,
    WRITTEN_SECONDS,
    comes_from,
    is_damaged,
    is_split,
    make_private,
    read_json,
    remove,
    remove_leftovers,
    size_of,
    unsplit,
    write_json,
)

ABOUT = "about.json"
CHOICES = "choices.json"
OF_GROUP = (ABOUT, CHOICES, "fxgraph", "aotautograd", "triton")  # at least one is in a group's folder
# Another ComfyUI of the same user may be compiling into a folder that was used in these last seconds.
IN_USE_SECONDS = 600
# From the opening, or a compilation, to the look at the size.
LOOK_SECONDS = 60
# The page asks for the sizes again and again, and all folders are walked for them.
USAGE_SECONDS = 5
_lock = threading.RLock()


@dataclass
class DiskCache:
    """The folders of all groups below one root."""

    root: Path
    limit: int  # bytes of all folders together

    def __post_init__(self) -> None:
        self._compiling: dict[str, int] = {}
        self._looked_at: set[str] = set()
        self._healed: set[str] = set()
        self._later: threading.Timer | None = None
        self._entries: list[dict] = []
        self._walked: float | None = None

    def enter(self, name: str, block: str) -> None:
        """Have inductor and Triton use the folder `name` until `exit`; people who look into the folder read `block` there."""
        folder = self.root / name
        with _lock:
            variables = {"inductor_folder": str(folder)}
            if users_triton_folder() is None:
                variables["triton_folder"] = str(folder / "triton")
            try:
                self._make(name, block)
                if name not in self._looked_at:
                    self._looked_at.add(name)
                    if is_damaged(folder, WRITTEN_SECONDS):
                        self._compile_anew(name, "files in it are empty, as after a loss of power")
            except OSError as error:  # removed or full since it was opened: compiling itself must not fail over that
                logger.warning("the cache folder %s cannot be used: %s", folder, error)
                variables = {}
            folder_scope.enter(**variables)
            self._compiling[name] = self._compiling.get(name, 0) + 1  # last: who fails to enter does not exit

    def exit(self, name: str) -> None:
        with _lock:
            self._compiling[name] -= 1
            if not self._compiling[name]:
                del self._compiling[name]
            folder_scope.exit()
            self._look_later(LOOK_SECONDS)

    def drop_if_corrupt(self, name: str, error: BaseException) -> bool:
        """Empty a folder, entered or not, if it caused the error that a compilation raised; returns whether to compile again.

        Once for each folder in a process: what fails again has another cause.
        """
        folder = self.root / name
        with _lock:
            if name in self._healed or not (comes_from(error, folder) or is_damaged(folder)):
                return False
            self._healed.add(name)
            self._compile_anew(name, f"what is in it cannot be loaded ({type(error).__name__})")
            return True

    def _compile_anew(self, name: str, reason: str) -> None:
        logger.warning("the cache folder %s is damaged, %s: it is emptied, and compiled anew", self.root / name, reason)
        _empty(self.root / name, ABOUT, CHOICES)

    def recall(self, network: nn.Module, key: str) -> str | None:
        """A choice that `remember` has kept, in this process or an earlier one."""
        return read_json(self.root / folder_of(network) / CHOICES).get(key)

    def remember(self, network: nn.Module, key: str, value: str) -> None:
        """Keep a choice that compiled code of a network depends on, for other processes, in a folder like those of groups."""
        try:
            self._make(folder_of(network), type(network).__name__)
            file = self.root / folder_of(network) / CHOICES
            write_json(file, read_json(file) | {key: value})
        except OSError as error:
            logger.warning("%s is not kept in %s: %s", value, self.root, error)

    def _make(self, name: str, owner: str) -> None:
        about = self.root / name / ABOUT
        make_private(about.parent)
        if not read_json(about):
            write_json(about, {"class": owner, **environment()}, indent=1)
        os.utime(about)

    def loaded(self, names: Iterable[str]) -> None:
        """After files were unpacked into these folders: remove them last."""
        self._walked = None
        for name in names:
            with suppress(OSError):
                os.utime(self.root / name / ABOUT)

    def folders(self) -> list[Path]:
        """The groups' folders, least recently used first; also those that have lost their description."""
        named = [folder for folder in self.root.glob("*") if KIND.fullmatch(folder.name)]
        return sorted((f for f in named if any(os.path.exists(f / entry) for entry in OF_GROUP)), key=_last_used)

    def has_current(self) -> bool:
        """Whether a folder was written by the same versions on the same device."""
        now = environment().items()
        return any(now <= read_json(folder / ABOUT).items() for folder in self.folders())

    def size(self) -> int:
        return sum(map(size_of, self.folders()))

    def trim(self) -> int:
        """Remove leftovers of killed processes, and the least recently used folders until the rest is within the limit.

        Folders stay that this process compiles into, or (used in the last ten minutes) another may. Returns the bytes removed.
        """
        self._remove_leftovers()
        # Without the lock, which lowering needs: on a slow drive the walk takes a minute.
        sizes = {folder: size_of(folder) for folder in self.folders()}
        total = excess = sum(sizes.values())
        for folder, size in sizes.items():
            if total <= self.limit:
                break
            with _lock:
                if folder.name not in self._compiling and time.time() - _last_used(folder) > IN_USE_SECONDS:
                    total -= size - _remove_group(folder)
        self._walked = None
        if total != excess:
            logger.info("compile cache: %d MiB removed, %d MiB kept in %s", (excess - total) >> 20, total >> 20, self.root)
        return excess - total

    def _remove_leftovers(self) -> None:
        remove_leftovers([*self.root.glob("*"), *self.root.parent.glob("torch-compile-kit-*.partial")])
        for folder in self.folders():
            if folder.name not in self._compiling:
                for parent, folders, files in os.walk(folder):  # another server may remove them meanwhile
                    remove_leftovers((Path(parent, name) for name in (*folders, *files)), IN_GROUP)

    def _look_later(self, seconds: float) -> None:
        """Trim once after `seconds`, for all that is compiled until then."""
        if self._later is None:
            timer = threading.Timer(seconds, self._look)
            timer.daemon = True
            if started(timer):
                self._later = timer

    def _look(self) -> None:
        try:
            self.trim()
        finally:
            self._later = None
        if self.size() > self.limit:  # the rest is in use
            with _lock:
                self._look_later(IN_USE_SECONDS)

    def clear(self) -> int:
        """Remove all folders but those that are being compiled into; returns the bytes removed. Loaded code goes on working."""
        before = self.size()
        for folder in self.folders():
            with _lock:
                if folder.name not in self._compiling:
                    _remove_group(folder)
        self._walked = None
        return before - self.size()

    def usage(self) -> dict:
        """Folder, sizes and entries for the page and for scripts; up to `USAGE_SECONDS` old."""
        now = time.monotonic()
        if self._walked is None or now - self._walked > USAGE_SECONDS:
            self._entries = [{"name": f.name, "bytes": size_of(f), **read_json(f / ABOUT)} for f in reversed(self.folders())]
            self._walked = now
        total = sum(entry["bytes"] for entry in self._entries)
        return {"folder": str(self.root), "bytes": total, "limit": self.limit, "entries": self._entries}


class _Current:
    """The cache of this process; None until the host names a folder, or when that cannot be written."""

    cache: DiskCache | None = None
    opened = False


def current() -> DiskCache | None:
    return _Current.cache


def open_cache(folder: Path, limit: object = None) -> DiskCache | None:
    """Use `folder` from now on, or the user's (`environment.users_folder`); later calls change nothing.

    Where the folder cannot be made private (`folders.make_private`) or written, or a C++ compiler would split its path, use
    another folder of this user, and say so in the log; where there is none either, PyTorch's.

    Args:
        limit: the user's setting, in GiB.
    """
    if _Current.opened:  # without the lock: a removal holds it for as long as a slow drive takes, and the event loop asks, too
        return _Current.cache
    with _lock:
        if not _Current.opened:
            refused = []
            places = _places(folder)
            if is_split(places[0][-1]):
                refused.append(f"{places[0][-1]} has a space or a quote in it, where C++ compilers split paths")
            # The last resort is a folder in which only a GPU's code can be compiled.
            for place in sorted(places, key=lambda place: is_split(place[-1])):
                try:
                    make_private(*place)
                    with tempfile.TemporaryFile(dir=place[-1]):
                        pass
                except OSError as error:
                    refused.append(f"{place[-1]} cannot be used: {error}")
                else:
                    _Current.cache = DiskCache(place[-1], limit_in_bytes(limit))
                    _Current.cache._look_later(LOOK_SECONDS)
                    break
            if refused:
                logger.warning(
                    "the cache folder %s. Compiled code goes to %s; %s names another folder",
                    "; ".join(refused),
                    _Current.cache.root if _Current.cache else "the system's temp folder, and may be lost at the next restart",
                    FOLDER,
                )
            _Current.opened = True
        return _Current.cache


def was_opened_before(folder: Path) -> bool:
    """Whether one of the folders that `open_cache` would use is there; creates none."""
    return any(os.path.isdir(place[-1]) for place in _places(folder))  # not Path.is_dir, which may raise PermissionError


def _places(folder: Path) -> list[list[Path]]:
    """Folders for the cache, best first, each behind those above it that must be private too."""
    users, user = users_folder(), os.geteuid() if hasattr(os, "geteuid") else os.environ.get("USERNAME", "")
    # Of this user alone, on drives that keep rights; a container's user may have no home.
    local = (Path(os.path.expanduser("~"), ".cache", KIT), Path(tempfile.gettempdir(), f"{KIT}-{user}"))
    places = [[above, above / "cache"] for above in local if above.is_absolute()]
    places = [[users] if users else [folder.parent, folder], *places]
    return [[unsplit(above) for above in place] for place in places]


def folder_name(block: str, structure: tuple) -> str:
    """A short name (paths are limited on Windows) for blocks of a class and a structure, the same in every process.

    Names of Python modules are left out, since those of custom packs depend on the folder that a pack is in. What differs
    beyond the structure, inductor tells apart in its own keys.
    """
    layers, *tensors = structure
    layers = tuple((name, *rest) for name, _module, *rest in layers)
    text = json.dumps([environment(), block, layers, tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder_of(network: nn.Module) -> str:
    """The name of the folder in which the choices of a whole network lie."""
    return folder_name(type(network).__name__, structure_of(network))


def structure_of(block: nn.Module) -> tuple:
    """What blocks must share to share graphs: classes of the layers, options that are None, and shapes of the weights."""
    layers = tuple((name, type(m).__module__, type(m).__qualname__, _absent(m)) for name, m in block.named_modules())
    weights = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    buffers = tuple((name, tuple(b.shape)) for name, b in block.named_buffers())
    return layers, weights, buffers


def _absent(module: nn.Module) -> tuple[str, ...]:
    """Options that a composite layer does not use (a window of attention). Leaves are left out: ComfyUI keeps state on them."""
    if not module._modules:
        return ()
    return tuple(sorted(name for name, value in vars(module).items() if value is None and not name.startswith("_")))


def _remove_group(folder: Path) -> int:
    """Remove a group's folder, its description only if nothing else is left; returns the bytes that stay."""
    return remove(folder) if folder.is_symlink() or _empty(folder, ABOUT) else size_of(folder)


def _empty(folder: Path, *kept: str) -> bool:
    """Remove all entries of a folder but those to be kept; returns whether nothing else is left."""
    try:
        for entry in folder.iterdir():
            if entry.name not in kept:
                with suppress(OSError):
                    remove(entry)
        return all(entry.name in kept for entry in folder.iterdir())
    except FileNotFoundError:  # removed meanwhile: empty enough
        return True


def _last_used(folder: Path) -> float:
    """The time of the last use; 0 if it cannot be told or is in the future, as the clock was wrong then."""
    about = folder / ABOUT
    try:
        used = (about if about.exists() else folder).stat().st_mtime
    except OSError:
        return 0.0
    return used if used <= time.time() + IN_USE_SECONDS else 0.0
