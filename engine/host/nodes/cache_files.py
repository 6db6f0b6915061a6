"""Save what is compiled for a model into a file of the host's user, and load it on another machine."""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

from torch import nn

from ...cache.archive import SUFFIX, CacheFileError, load_cache_file, write_cache_file
from ...cache.code_store import CodeStore
from ...cache.structure import name_of
from ...compile.group import BlockGroup
from ...compile.registry import code_of, live_models
from ...errors import InvalidSetting, shown
from ...files import status_of
from ...log import logger
from ...messages.recompile_log import CallInfo, watch_of
from ...messages.words import ENGLISH, say, say_in_english, speaking
from ...settings import CompileSettings
from ...user_input import check_model, check_text
from ..model.attach import diffusion_model, model_name, settings_for
from ..model.user_folder import kit_folder, open_users_store

NO_FILE = "none"
# File name -> how often saving failed, the node's fingerprint: after a failure ComfyUI runs the node again with equal inputs.
not_saved: Counter[str] = Counter()
# Windows writes a file named like a device to that device, whatever its suffix; files go from machine to machine.
_DEVICE = r"(con|prn|aux|nul|(com|lpt)[0-9]) *(\..*)?"
_PLAIN_NAME = re.compile(rf"(?!(?i:{_DEVICE})$)[A-Za-z0-9_][A-Za-z0-9 ._-]{{0,99}}")


def cache_files() -> list[str]:
    """The names of the cache files in the folder, newest first."""
    files = []
    with suppress(OSError):
        files = [file for file in kit_folder().iterdir() if file.suffix == SUFFIX and file.is_file()]
    changed = {file.name: stat.st_mtime for file in files if (stat := status_of(file)) is not None}
    return sorted(changed, key=lambda name: -changed[name])


def plain_name(filename: str) -> str:
    """The name without its suffix; raises InvalidSetting if no file of the user's folder can have that name."""
    check_text("filename", filename)
    name = filename.strip().removesuffix(SUFFIX)
    if not _PLAIN_NAME.fullmatch(name):
        raise InvalidSetting(
            "filename",
            filename,
            "use letters, digits, spaces, dots, - and _, at most 100 of them, no folder, no device of Windows (con, nul).",
        )
    return name


def save_cache(patcher, filename: str) -> tuple[Path | None, str]:
    """Write what has been compiled for a model into one file in the user's folder.

    Returns:
        The file, or None where there is nothing to save or it cannot be written, and a sentence: the prompt goes on.

    Raises:
        InvalidSetting: `filename` is no plain name, or `patcher` no model.
    """
    check_model(patcher)
    name = plain_name(filename)
    settings = _settings_to_save(patcher)
    if isinstance(settings, str):
        with speaking(ENGLISH):
            logger.info("%s", _settings_to_save(patcher))
        return None, settings
    network = diffusion_model(patcher)
    delegate = getattr(patcher, "non_dynamic_delegate_model", None)
    groups = code_of(network).groups_of(settings)
    if delegate is not None and not any(group.stats.graphs for group in groups):
        network = delegate[0].diffusion_model  # prompts with LoRA hooks run it, see `sampled_patcher`
        groups = code_of(network).groups_of(settings)
    infos = watch_of(network).compiled_for.get(settings.settings_key(), [])
    try:
        return _write(name, [(model_name(patcher), network, groups)], infos)
    except CacheFileError as error:
        logger.warning("%s", say_in_english("cacheNotSaved", error))
        not_saved[filename] += 1
        return None, say("cacheNotSaved", error)


def _settings_to_save(patcher) -> CompileSettings | str:
    """The settings that the model is compiled under, or why there is nothing to save."""
    settings = settings_for(patcher, say("nothingToSave"))
    is_kept = isinstance(settings, str) or settings.backend == "inductor"
    return settings if is_kept else say("nothingToSave")


def save_all(filename: str) -> str:
    """Write what inductor has compiled for all models in memory into one file; returns a sentence about the file.

    Raises:
        InvalidSetting: `filename` is no plain name.
        CacheFileError: there is nothing to save, or the file cannot be written.
    """
    name, models, infos = plain_name(filename), [], []
    names: Counter[str] = Counter()
    for network, code in live_models():
        groups = [group for group in code.groups.values() if group.settings.backend == "inductor" and group.stats.graphs]
        if groups:
            title = code.title or type(network).__name__
            names[title] += 1
            models.append((f"{title} {names[title]}" if names[title] > 1 else title, network, groups))
            infos += [info for calls in watch_of(network).compiled_for.values() for info in calls]
    if not models:
        others = {g.settings.backend for _, code in live_models() for g in code.groups.values() if g.stats.graphs}
        kept = f"backend {' and '.join(sorted(others))} keeps nothing; set backend to inductor." if others else ""
        raise CacheFileError(kept or "nothing has been compiled in this session yet.")
    return _write(name, models, infos)[1]


def _write(name: str, models: list[tuple[str, nn.Module, list[BlockGroup]]], infos: list[CallInfo]) -> tuple[Path, str]:
    """Write the code of groups of models, each with a title for the file's header."""
    store = _users_store()
    sizes = list(dict.fromkeys(f"{replace(info, batch=1).size()} batch {info.batch}" for info in infos))
    path = kit_folder() / (name + SUFFIX)
    names = {name for _title, _network, groups in models for group in groups for name in group.code.entries}
    if not names:
        raise CacheFileError("nothing is compiled yet; save it when the node says ready, or after Torch Compile Warmup.")
    structures = {name_of(network) for _title, network, _groups in models}  # their choices name the code's attention kernel
    titles = [title for title, _network, _groups in models]
    count = write_cache_file(path, store, names, structures, pack_version(), titles, sizes)
    return path, say("cacheSaved", path, count, f"{path.stat().st_size / 1024**2:.1f}", ", ".join([*titles, *sizes]))


def _users_store() -> CodeStore:
    if (store := open_users_store()) is None:
        raise CacheFileError("there is no cache folder that can be written; see the log.")
    if not store.limit:
        raise CacheFileError("the cache on disk keeps nothing, as its limit is 0 GiB; raise it in ComfyUI's settings.")
    return store


def load_cache(filename: str) -> str:
    """Unpack a file of the user's folder into the cache; says what was loaded, or why blocks compile without it."""
    if filename == NO_FILE:
        return say("noFileChosen")
    try:
        if filename not in cache_files():
            is_there = status_of(kit_folder() / PurePath(str(filename)).name) is not None
            why = f"is no cache file, whose name ends in {SUFFIX}" if is_there else f"is not in {kit_folder()}; put it there"
            raise CacheFileError(f"{shown(filename)} {why}, or choose another.")
        loaded = load_cache_file(kit_folder() / filename, _users_store())
    except (CacheFileError, OSError, ValueError) as error:
        logger.warning("%s", say_in_english("cacheNotLoaded", error))
        return say("cacheNotLoaded", error)
    what = "; ".join(filter(None, (", ".join(loaded.models), ", ".join(loaded.sizes))))  # some code has no sizes
    logger.info("%s", say_in_english("cacheLoaded", filename, len(loaded.entries), what))
    return say("cacheLoaded", filename, len(loaded.entries), what)


def state_of(filename: str) -> str:
    """A text that changes when the file changes, or its permissions, for which it may have been refused."""
    stat = status_of(kit_folder() / filename) if filename in cache_files() else None
    return "" if stat is None else f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_size}"


def pack_version() -> str:
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'^version = "(.+)"', text, re.MULTILINE)[0]
