"""Open the store of the host's user, and get ready to compile."""

import json
import sys
import threading
from pathlib import Path

import folder_paths

from ...cache.code_store import CodeStore, current, open_store, was_opened_before
from ...cache.environment import compile_for
from ...cache.shared import configure, configured
from ...compile_process.client import compile_process
from ...compile_process.obtain import import_ahead
from ...settings import CompileSettings
from ...threads import call_later, started
from ..adapter import device_type

STORE = "store"
LIMIT_SETTING = "TorchCompileKit.CacheGiB"  # js/settings.js
# Modules of the host that register what graphs name: the layouts of quantised weights.
REGISTERING = ("comfy.quant_ops",)
# After a start without a prompt for so long nobody waits for what else is done. Beside the steps of one, imports slow these.
QUIET_SECONDS = 2.0
_prompt_came = threading.Event()


def kit_folder() -> Path:
    """The pack's folder in the user's: cache files lie in it, the store itself in `store`."""
    return Path(folder_paths.get_user_directory()) / "torch-compile-kit"


def open_users_store() -> CodeStore | None:
    compile_for(device_type())
    configure(kit_folder())
    return open_store(kit_folder() / STORE, users_settings().get(LIMIT_SETTING))


def users_settings() -> dict:
    """The settings of the page (app/user_manager.py, app/app_settings.py); of several users those of the first.

    Pages of other sites can write them: nothing read from them may name a place, or delete more than compiled code.
    """
    try:
        settings = json.loads((Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def get_ready(settings: CompileSettings) -> None:
    """Open the store; start the compile process while the model loads, unless code of these versions is kept here or shared:
    then it may not be needed, and is started by the first graph that is missing."""
    _prompt_came.set()
    compile_process.modules = lambda: [name for name in REGISTERING if name in sys.modules]
    open_users_store()
    if settings.backend == "inductor":
        if compile_process.pid is None:  # a server that shares code may not answer
            started(threading.Thread(target=_start_unless_kept, name="torch-compile-kit start", daemon=True))
        if settings.waits:
            import_ahead()


def _start_unless_kept() -> None:
    if not any(kept is not None and kept.has_current() for kept in (current(), configured())):
        compile_process.start()


def get_ready_again() -> None:
    """After a restart: import what loading needs before the first prompt, if there is code that was made here before."""
    if was_opened_before(kit_folder() / STORE) and (store := open_users_store()) is not None and store.has_current():
        call_later(QUIET_SECONDS, _import_if_quiet)


def _import_if_quiet() -> None:
    if not _prompt_came.is_set():
        import_ahead()
