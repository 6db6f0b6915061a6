"""Open the store of the host's user, and get ready to compile."""

import json
import sys
import threading
from pathlib import Path

import folder_paths

from ...cache.code_store import CodeStore, open_store, was_opened_before
from ...cache.environment import compile_for
from ...cache.shared import configure
from ...compile_process.client import compile_process
from ...compile_process.load_ahead import load_ahead
from ...compile_process.obtain import get_ready_to_compile
from ...settings import CompileSettings
from ..adapter import device_type, forbids_threads

STORE = "store"
LIMIT_SETTING = "TorchCompileKit.CacheGiB"  # js/settings.js
# Modules of the host that register names which graphs refer to: the layouts of quantised weights.
REGISTERING = ("comfy.quant_ops",)
_prompt_came = threading.Event()


def kit_folder() -> Path:
    """The pack's folder in the user's folder: holds the cache files, and the store in its subfolder STORE."""
    return Path(folder_paths.get_user_directory()) / "torch-compile-kit"


def open_users_store() -> CodeStore | None:
    compile_for(device_type())
    configure(kit_folder())
    return open_store(kit_folder() / STORE, users_settings().get(LIMIT_SETTING))


def users_settings() -> dict:
    """The settings of the page (app/user_manager.py, app/app_settings.py); with several users, those of the first.

    Pages of other sites can write these settings: none of them may name a path, or delete more than compiled code.
    """
    try:
        settings = json.loads((Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def prompt_came() -> None:
    """Called when any prompt is queued: from now on nothing is loaded ahead."""
    _prompt_came.set()


def get_ready(settings: CompileSettings) -> None:
    """Open the store. If the first call compiles, get ready to compile while the model loads; else payback.py does so when
    compiling is to begin."""
    _prompt_came.set()
    compile_process.modules = lambda: [name for name in REGISTERING if name in sys.modules]
    open_users_store()
    if settings.backend == "inductor" and (settings.waits or device_type() != "cuda"):
        get_ready_to_compile(imports=settings.waits)


def get_ready_again() -> None:
    """After a restart: load the store's code for these versions, until a prompt comes, whose steps loading would slow."""
    if forbids_threads() or not was_opened_before(kit_folder() / STORE):
        return
    store = open_users_store()
    if store is not None and store.has_current() and not _prompt_came.is_set():
        load_ahead(store, lambda: not _prompt_came.is_set())
