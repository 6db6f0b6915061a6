"""Load code that the compile process has made, or that was kept, into this process."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..log import logger
from ..threads import started
from ..torch_compat import private
from ..torch_settings import folder_scope, loading_scope
from .client import Code, compile_process, folders


def load(code: Code) -> Callable[..., Any]:
    """A function of the graph's inputs. Nothing is traced or lowered.

    Raises:
        Exception: PyTorch's, of whatever kind, for an artefact that is damaged or of another version.
    """
    scratch = compile_process.scratch
    for name, content in code.files.items():
        file = Path(scratch, name)
        if scratch.resolve() not in file.resolve().parents:
            raise ValueError(f"a file of the code would lie outside of its folder: {name}")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
    inductor, triton = folders(scratch).values()
    # For headers, inductor has the C++ compiler read PyTorch's, though all kernels are built.
    without_headers = loading_scope.applied(cpp_cache_precompile_headers=False) if code.files else nullcontext()
    with folder_scope.applied(inductor_folder=inductor, triton_folder=triton), without_headers:
        artefact = private.AOTCompiledArtifact.deserialize(code.artefact)
    return lambda *args: artefact(*args)


@functools.cache
def import_ahead() -> threading.Thread:
    """Import what tracing and `load` need, seconds of Python, on a thread of its own: while a model is loaded, or the compile
    process works. Once a process."""
    thread = threading.Thread(target=_import, name="torch-compile-kit import", daemon=True)
    started(thread)
    return thread


def _import() -> None:
    began = time.perf_counter()
    with suppress(private.MissingName):
        for name in ("callback_handler", "AOTCompiledArtifact", "autograd_cache", "triton_heuristics", "codegen"):
            getattr(private, name)
    logger.debug("imported what loading code needs in %.1f s", time.perf_counter() - began)
