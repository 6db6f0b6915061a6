"""Open the cache of the host's user, and get ready to compile."""

import json
from pathlib import Path

import folder_paths

from ...background.isolation import warm_up_dynamo
from ...cache.disk import DiskCache, open_cache, was_opened_before
from ...cache.environment import compile_for
from ...cache.shared import configure
from ...cache.startup import import_inductor, prepare, start_workers
from ...settings import CompileSettings
from ..adapter import device_type

CACHE = "cache"
LIMIT_SETTING = "TorchCompileKit.CacheGiB"  # js/settings.js


def kit_folder() -> Path:
    """The pack's folder in the user's: cache files lie in it, the cache itself in `cache`."""
    return Path(folder_paths.get_user_directory()) / "torch-compile-kit"


def open_users_cache() -> DiskCache | None:
    compile_for(device_type())
    configure(kit_folder())
    return open_cache(kit_folder() / CACHE, users_settings().get(LIMIT_SETTING))


def users_settings() -> dict:
    """The settings of the page (app/user_manager.py, app/app_settings.py); of several users those of the first.

    Pages of other sites can write them: nothing read from them may name a place, or delete more than compiled code.
    """
    try:
        settings = json.loads((Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def get_ready_again() -> None:
    """Prepare after a restart, before the first prompt, if code was compiled here before with these versions."""
    if was_opened_before(kit_folder() / CACHE) and (cache := open_users_cache()) is not None and cache.has_current():
        _prepare()


def get_ready(settings: CompileSettings) -> None:
    """Open the cache, and prepare for tracing and lowering if the sampler will wait. Once a process.

    For work beside a GPU nothing is prepared yet: few steps may never be compiled (payback.py).
    """
    open_users_cache()
    if settings.backend == "inductor" and settings.waits:
        _prepare()
    elif device_type() != "cuda":
        prepare(warm_up_dynamo)


def _prepare() -> None:
    prepare(*([start_workers] if device_type() == "cuda" else []), warm_up_dynamo, import_inductor)
