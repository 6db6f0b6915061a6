"""The files of stored traces, in the folders of the disk cache."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

from .disk_cache import current
from .failures import never_swallowed
from .identities import functions_in
from .layouts import sides_of_one
from .monitor import compiling
from .stored_traces import arguments_of, guards_of, load
from .trace_record import Trace, can_store, dumps

logger = logging.getLogger("torch-compile-kit")
FOLDER = "traces"
# Of the same call, under other settings of PyTorch or with other code: a process tries the newest first.
KEPT = 4


def trace_key(forward: Callable, settings: tuple, dynamic: bool, sources: str, shapes: tuple) -> str | None:
    """A name for what a trace is of, by all that can be told before it is read; None where traces cannot be kept.

    Args:
        forward: what is traced.
        settings: see `CompileSettings.kind_key`.
        dynamic: sizes vary.
        sources: numbers that vary, see torch.compiler.config.dynamic_sources.
        shapes: see `layouts.shapes_of`.
    """
    if not can_store() or current() is None:
        return None
    shapes = sides_of_one(shapes) if dynamic else shapes
    text = repr((functions_in(forward), settings, dynamic, sources, shapes, _settings_of_torch()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _settings_of_torch() -> str:
    """What PyTorch's own keys would notice, and are not asked about when a trace is loaded."""
    import torch._functorch.config
    import torch._inductor.config

    chosen = torch._inductor.config.save_config_portable(), torch._functorch.config.save_config_portable()
    return repr([sorted(config.items()) for config in chosen])


def load_trace(folder: str, key: str, own: types.FunctionType, args: tuple, kwargs: dict) -> bool:
    """Give a function compiled code from a stored trace, if it has none for the call that it is about to get.

    Args:
        folder: of the kind, in the cache.
        key: see `trace_key`.
        own, args, kwargs: see `stored_traces.load`.

    Returns:
        Whether it has more code than before.
    """
    try:
        files = _files(folder, key)
        if not files:
            return False
        arguments = arguments_of(own, args, kwargs)
        if any(guards.check(arguments) for guards in guards_of(own.__code__)):
            return False
    except Exception as error:  # a folder that cannot be listed, an empty closure: it is compiled
        logger.debug("%s: %s: %s", own.__qualname__, type(error).__name__, error)
        return False
    for file in files:
        with compiling():
            try:
                if load(file.read_bytes(), own, args, kwargs):
                    return True
            except Exception as error:  # it is compiled instead
                logger.debug("%s is not loaded: %s: %s", file, type(error).__name__, error)
                if never_swallowed(error):  # no memory to compare it with eager
                    return False
    return False


def store_traces(folder: str, key: str, traces: list[Trace | None]) -> None:
    """Write what a call has traced, if it can be had again from one trace; older ones of the key go when there are many."""
    cache = current()
    if cache is None or len(traces) != 1 or traces[0] is None:
        return
    try:
        data = dumps(traces[0])
        target = cache.root / folder / FOLDER
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target, suffix=".tmp", delete=False) as made:
            made.write(data)
        try:
            os.replace(made.name, target / f"{key}-{hashlib.sha256(data).hexdigest()[:12]}")
        finally:
            Path(made.name).unlink(missing_ok=True)
        for file in _files(folder, key)[KEPT:]:
            file.unlink(missing_ok=True)
    except Exception as error:  # the block is compiled, and traced again in the next process
        logger.debug("a trace is not kept: %s: %s", type(error).__name__, error)


def _files(folder: str, key: str) -> list[Path]:
    """Newest first."""
    cache = current()
    if cache is None:
        return []
    found = [file for file in (cache.root / folder / FOLDER).glob(f"{key}-*") if file.suffix != ".tmp"]
    return sorted(found, key=_written, reverse=True)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
