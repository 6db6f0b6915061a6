"""Lower graphs that come over the wire. Runs in the compile process: child.py imports this once it knows the cards."""

import os
import traceback
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..failures.describe import chain, describe_failure
from ..inductor import backend
from ..torch_compat import private
from . import lowering_settings, wire
from .artefact import Code, LowerInline

LIBRARIES = {".so", ".dylib", ".pyd", ".dll"}
# PyTorch's errors for graphs that have no artefact.
_BYPASS = {"BypassAOTAutogradCache", "BypassFxGraphCache"}
# Libraries that test what this CPU can do. PyTorch builds them with the first kernel.
_probes: set[str] = set()


def prepare() -> None:
    private.switch("init_gpu_context")[1](lambda *_args: None)
    lowering_settings.prepare_process()
    private.maybe_warm_pool()
    if private.compile_fx is None:  # fails for good: PyTorch's modules cannot be imported a second time
        raise ImportError("PyTorch's compiler cannot be imported")


def warm_up() -> None:
    """Lower a small graph for a card: PyTorch makes tables and imports modules for the first graph."""
    device = torch.device("cuda", 0)
    with private.FakeTensorMode(shape_env=private.ShapeEnv()) as mode:
        inputs = [torch.empty(64, 64, dtype=torch.bfloat16, device=device) for _ in range(2)]
    graph = fx.symbolic_trace(lambda x, y: torch.sum(torch.sin(torch.mm(x, y)), 1))
    with (
        backend.replacements(inputs),
        lowering_settings.for_graph(lowering_settings.now(device)),
        private.tracing(private.TracingContext(mode)),
    ):
        private.AOTCompiledArtifact(backend.inductor(graph, inputs)).serialize()


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    try:
        return _lowered(request)
    except Exception as error:
        traceback.print_exc()
        for one in chain(error):
            if isinstance(one, LowerInline | private.MissingName) or type(one).__name__ in _BYPASS:
                return {"inline": f"{type(one).__name__}: {one}"[:1500]}, b""
        failure = describe_failure("", error)
        return {"failure": [failure.reason, failure.cure, failure.may_pass]}, b""


def _lowered(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    graph, inputs, mode = wire.loads(request["graph"])
    before = _libraries().keys()
    private.cpp_kernels.clear()  # so that it lists this graph's kernels only; files and modules of other graphs stay
    lowering_settings.set_for_process(request["settings"])
    private.inductor_config.unsafe_marked_cacheable_functions = lowering_settings.cacheable_functions(graph)
    with backend.replacements(inputs):
        with lowering_settings.for_graph(request["settings"]), private.tracing(private.TracingContext(mode)):
            code = backend.inductor(graph, list(inputs), options=request["options"])
        if not hasattr(code, "serialize"):
            raise LowerInline("PyTorch gives no artefact for it")
        artefact = private.AOTCompiledArtifact(code).serialize()
    return {"code": True}, Code(artefact, wire.guards_of(inputs, mode), _files_of_graph(before)).packed({})


def _files_of_graph(before: Set[str]) -> dict[str, bytes]:
    """The libraries with which the code that was just lowered is loaded."""
    now = _libraries()
    kernels = {name for name, file in now.items() if file.name.partition(".")[0] in private.cpp_kernels}
    if kernels:
        _probes.update(name for name in now.keys() - before - kernels if not name.startswith("triton/"))
        kernels |= _probes
    return {name: now[name].read_bytes() for name in sorted(now.keys() - before | kernels)}


def _libraries() -> dict[str, Path]:
    """Files that kernels for the CPU are loaded from, by their paths in inductor's folder."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.suffix in LIBRARIES}
