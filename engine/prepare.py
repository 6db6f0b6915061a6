"""What the first compilation of a process needs, done in the background while the model is still loading.

Importing inductor and hashing PyTorch's and Triton's sources for the keys of the disk cache takes seconds; on a CPU PyTorch
also starts a Python for each of the CPU's vector instruction sets, to see that it can load code for it. Compiling something
small would prepare more, but PyTorch saves and restores the random state around it, which is the sampler's (convert_frame.py);
and fake tensors in a second thread crashed the first one's compilation (torch 2.11).
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
import threading
import time

import torch

from .disk_cache import current
from .vec_isa import know_instruction_sets

logger = logging.getLogger("torch-compile-kit")
PATIENCE = 300.0
INSTRUCTION_SETS = "cpu.json"
IMPORTS = "imports.json"
# What compiling imports late: PyTorch's own modules, save for those that it makes of generated code.
_LATE = re.compile(r"(torch|triton)(\.(?!compile_tasks)\w+)+")


class _Preparation:
    thread: threading.Thread | None = None
    imported: set[str] | None = None


def prepare(on_gpu: bool) -> None:
    """Start once a process; returns at once.

    Args:
        on_gpu: the model runs on a CUDA device.
    """
    if _Preparation.thread is None:
        _Preparation.thread = threading.Thread(target=_run, args=(on_gpu,), name="torch-compile-kit prepare", daemon=True)
        _Preparation.thread.start()


def wait_until_prepared() -> float:
    """Called before inductor is used: two threads at the same imports are slower than one.

    Returns:
        Seconds waited.
    """
    began = time.perf_counter()
    if _Preparation.thread is not None:
        _Preparation.thread.join(PATIENCE)
    return time.perf_counter() - began


def note_imports() -> None:
    """After a graph came from disk: what that imported, the next process will import while it prepares."""
    cache, before = current(), _Preparation.imported
    if cache is None or before is None:
        return
    late = {name for name in set(sys.modules) - before if _LATE.fullmatch(name)}
    if late:
        before |= late
        known = _recorded_imports()
        if late - known:
            try:
                (cache.root / IMPORTS).write_text(json.dumps(sorted(known | late)), encoding="utf-8")
            except OSError as error:
                logger.debug("imports are not noted: %s", error)


def _run(on_gpu: bool) -> None:
    for step in (_import_inductor, _compute_keys, *(() if on_gpu else (_probe_cpu,)), _read_sources, _trim):
        began = time.perf_counter()
        try:
            step()
        except Exception as error:  # the compilation does it again, and tells what is wrong
            logger.debug("%s: %s", step.__name__, error)
        logger.debug("%s: %.2f s", step.__name__.strip("_"), time.perf_counter() - began)
    _Preparation.imported = set(sys.modules)


def _import_inductor() -> None:
    import torch._dynamo.backends.inductor
    import torch._functorch._aot_autograd.autograd_cache
    import torch._inductor.async_compile
    import torch._inductor.compile_fx  # noqa: F401

    for name in _recorded_imports():
        try:
            importlib.import_module(name)
        except Exception as error:  # of another version of PyTorch, say
            logger.debug("%s: %s", name, error)


def _recorded_imports() -> set[str]:
    cache = current()
    try:
        found = json.loads((cache.root / IMPORTS).read_text(encoding="utf-8")) if cache is not None else []
        return {name for name in found if _LATE.fullmatch(name)}
    except (OSError, ValueError, TypeError):
        return set()


def _compute_keys() -> None:
    """PyTorch keeps both for the process (functools.cache)."""
    from torch._inductor.codecache import CacheBase, torch_key

    torch_key()
    CacheBase.get_system()


def _probe_cpu() -> None:
    cache = current()
    if cache is not None:
        know_instruction_sets(cache.root / INSTRUCTION_SETS)


def _read_sources() -> None:
    """PyTorch notes which function each traced line is in, and reads whole files for that."""
    from torch._dynamo.funcname_cache import get_funcname

    for module in (torch.nn.functional, torch.nn.modules.module, torch.nn.modules.linear, torch.nn.modules.normalization):
        get_funcname(module.__file__, 1)


def _trim() -> None:
    cache = current()
    if cache is not None:
        cache.trim()
