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
import os
import pkgutil
import re
import sys
import threading
import time
from collections.abc import Callable

from torch._dynamo import funcname_cache

from .disk_cache import current
from .kernel_workers import start_workers
from .vec_isa import know_instruction_sets

logger = logging.getLogger("torch-compile-kit")
PATIENCE = 300.0
INSTRUCTION_SETS = "cpu.json"
IMPORTS = "imports.json"
SOURCES = "sources.json"
# What reading a graph from disk imports late, until there is a record; compiling one imports it as well.
FIRST_IMPORTS = {
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch._inductor.compiler_bisector",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.mps",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.python_wrapper_mtia",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.hooks",
    "triton.tools.tensor_descriptor",
}
# What compiling imports beside that, the packages with all that is in them.
LATE_IMPORTS = (
    "triton.compiler.code_generator",
    "torch._inductor.bounds",
    "torch._inductor.choices",
    "torch._inductor.kernel_template_choice",
    "torch._inductor.runtime.caching",
    "torch._inductor.codegen.xpu.device_op_overrides",
    "torch._inductor.codegen.cuda.device_op_overrides",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.serialized_patterns",
)
_PLAIN = re.compile(r"\w+(\.\w+)*")  # ComfyUI names packs by the folder they are in, which is nobody else's business
# What compiling imports late: PyTorch's own modules, save for those that it makes of generated code.
_LATE = re.compile(r"(torch|triton)(\.(?!compile_tasks)\w+)+")


class _Preparation:
    thread: threading.Thread | None = None
    wanted: bool = False  # somebody waits
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
    _Preparation.wanted = True
    if _Preparation.thread is not None:
        _Preparation.thread.join(PATIENCE)
    return time.perf_counter() - began


def note_needs(from_disk: bool) -> None:
    """After a compilation: what it imported and read, the next process does while it prepares.

    Args:
        from_disk: the graph was read; compiling one imports far more, which would only delay the next process.
    """
    _record(SOURCES, set(funcname_cache.cache))
    if from_disk and _Preparation.imported is not None:
        late = {name for name in set(sys.modules) - _Preparation.imported if _LATE.fullmatch(name)}
        _Preparation.imported |= late
        _record(IMPORTS, late)


def traced_modules() -> list[str]:
    """The loaded modules whose sources have been taken apart here, by name: files are elsewhere on another machine."""
    files = set(funcname_cache.cache) | _recorded(SOURCES)
    modules = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) in files]
    return sorted(name for name in modules if _PLAIN.fullmatch(name))


def expect_modules(names: list[str]) -> None:
    """Compiled code has come from another machine, where these were taken apart for it: do it while preparing."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    _record(SOURCES, {file for file in files if file})
    before = _Preparation.thread
    if before is not None:  # it may be past its sources, or done
        _Preparation.thread = threading.Thread(target=_read_after, args=(before,), name=before.name, daemon=True)
        _Preparation.thread.start()


def _record(name: str, found: set[str]) -> None:
    cache, known = current(), _recorded(name)
    if cache is not None and found - known:
        try:
            (cache.root / name).write_text(json.dumps(sorted(known | found)), encoding="utf-8")
        except OSError as error:
            logger.debug("%s is not written: %s", name, error)


def _recorded(name: str) -> set[str]:
    cache = current()
    try:
        found = json.loads((cache.root / name).read_text(encoding="utf-8")) if cache is not None else []
        return {entry for entry in found if isinstance(entry, str)}
    except (OSError, ValueError, TypeError):
        return set()


def _run(on_gpu: bool) -> None:
    restarted = _is_restart()
    steps = [_import_inductor, _compute_keys, _read_sources]
    if on_gpu:
        steps.append(_start_triton)
        if not restarted:
            steps.insert(0, start_workers)  # they start while this process imports
    else:
        steps.insert(2, _probe_cpu)
    for step in steps:
        _timed(step)
    if on_gpu and not restarted:  # reading needs none of these
        for step in map(_importing, LATE_IMPORTS):
            if not _Preparation.wanted:  # who waits can do them as well
                _timed(step)
    _Preparation.imported = set(sys.modules)
    _timed(_trim)


def _is_restart() -> bool:
    """Whether this machine has compiled before, as it is now: most graphs are read then."""
    cache = current()
    return cache is not None and bool(_recorded(SOURCES)) and cache.has_current()


def _timed(step: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        step()
    except Exception as error:  # the compilation does it again, and tells what is wrong
        logger.debug("%s: %s", step.__name__, error)
    logger.debug("%s: %.2f s", step.__name__.strip("_"), time.perf_counter() - began)


def _import_inductor() -> None:
    import torch._dynamo.backends.inductor
    import torch._functorch._aot_autograd.autograd_cache
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics  # noqa: F401

    for name in _recorded(IMPORTS) or FIRST_IMPORTS:
        try:
            if _LATE.fullmatch(name):
                importlib.import_module(name)
        except Exception as error:  # of another version of PyTorch, say
            logger.debug("%s: %s", name, error)


def _importing(name: str) -> Callable[[], object]:
    def step() -> None:
        module = importlib.import_module(name)
        for part in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(part.name)

    step.__name__ = name
    return step


def _start_triton() -> None:
    """Triton builds a library of its own when it is first used on a machine (triton/backends/nvidia/driver.py)."""
    from torch.utils._triton import triton_backend

    triton_backend()


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
    """PyTorch notes which function each traced line is in, and takes whole files apart for that (funcname_cache.py)."""
    for file in _recorded(SOURCES):
        if file.endswith(".py") and os.path.isfile(file):
            funcname_cache.get_funcname(file, 1)


def _read_after(preparation: threading.Thread) -> None:
    preparation.join()
    _timed(_read_sources)


def _trim() -> None:
    cache = current()
    if cache is not None:
        cache.trim()
