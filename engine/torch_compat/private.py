"""Look up PyTorch's private names at their first use, and warn what a missing one costs.

A new version of PyTorch may rename any private name, so no other package uses one directly. `private.counters` is the object of
that name in `NAMES`, or its `instead`. If a name whose `without` is None is missing, nothing is compiled (`unsupported`). A
missing name that only the compile process needs raises `MissingName`, and the graph is lowered in the call that traced it.
"""

import functools
import logging
import os
import pkgutil
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("torch-compile-kit")
# The versions of PyTorch with which the tests have passed, oldest first: those in the table of docs/compatibility.md.
# devtools/venvs.py (`TORCH`) says what goes with each.
TESTED = "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"
# Versions with which captures from memory of cudaMallocAsync work (tests/captures_async.py). A capture that fails can end the
# process, so other versions run without CUDA graphs.
CAPTURES_ASYNC = {"2.11", "2.15"}
# Versions in which freeing a CUDA graph frees the workspaces of cuBLAS that other graphs of its stream write to
# (`clearCublasWorkspacesForStream` in ATen/cuda/CUDAGraph.cpp, pytorch#193402).
FREES_WORKSPACES = {"2.12", "2.13", "2.14"}
# Since 2.13 a guard on an attribute of a tensor is missing if another tensor of the layer has that attribute, too.
GUARDS_ATTRIBUTES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# Attributes that `mark_static` sets on a tensor (torch/_dynamo/decorators.py): the dimensions, and from 2.13 on, a flag.
STATIC_MARKS = "_dynamo_static_indices", "_has_dynamo_dim_marking"
# Modules that PyTorch 2.11 imports in the middle of the first traces, in part to find the file that registers an operator among
# those of all modules: 0.4 of 1.5 s on two cores. In other versions some may be missing, or others take that time later.
IMPORTED_BY_TRACES = (
    *("torch.distributed.tensor.experimental", "torch.export._trace", "torch._dynamo.dce_extra_outputs"),
    *("sympy.tensor.tensor", "sympy.physics.units"),
)


class NeverRaised(Exception):
    """Replaces an exception that this PyTorch does not have."""


class MissingName(Exception):
    """A name is missing that the compile process needs: graphs are lowered in the call that traced them."""


def _nothing(*_args: object, **_kwargs: object) -> None: ...


@dataclass(frozen=True)
class PrivateName:
    """`path` is `module:attribute.attribute`, or a module; `without`: what is off if the name is missing (None: compiling)."""

    path: str
    without: str | None = None
    instead: Any = None

    def find(self) -> Any:
        return pkgutil.resolve_name(self.path)


_SLOWER_TRACE = "the first image waits longer for a trace"
_RECOMPILES = "a new size may compile again"
_NO_REPLACEMENTS = "inductor does not fuse ComfyUI's own kernels"
_ONE_PASS = "norms of long rows take two passes"
_NO_GRAPHS = "models with such kernels get no CUDA graphs"
_MODES = "CUDA graphs do not notice a mode that another node has entered"
_CACHE = "the first compilation of a start takes some seconds longer"
_IN_CALL = "graphs are compiled before the first image"
_AUTOGRAD_CACHE = "torch._functorch._aot_autograd.autograd_cache"

NAMES = {
    # What has been traced of a function, and when.
    "callback_handler": PrivateName("torch._dynamo.callback:callback_handler"),
    "counters": PrivateName("torch._dynamo.utils:counters", "graph breaks are not counted", defaultdict(Counter)),
    "get_compilation_metrics": PrivateName("torch._dynamo.utils:get_compilation_metrics", "causes are not told", list),
    "get_metrics_context": PrivateName(
        "torch._dynamo.utils:get_metrics_context", "code of some freed models stays in memory", _nothing
    ),
    "run": PrivateName("torch._dynamo:run", "blocks run uncompiled once tracing has taken too long", lambda function: function),
    "reset_code": PrivateName("torch._C:_dynamo.eval_frame.reset_code", "code of freed models stays in memory", _nothing),
    "cache_entries": PrivateName(
        "torch._C:_dynamo.eval_frame._debug_get_cache_entry_list",
        "a warmup does not notice that another node has reset Dynamo",
        lambda _code: [],
    ),
    "compile_lock": PrivateName(
        "torch._dynamo.convert_frame:compile_lock",
        "the process can end when another node resets Dynamo while a block runs",
        threading.RLock(),
    ),
    "FailOnRecompileLimitHit": PrivateName(
        "torch._dynamo.exc:FailOnRecompileLimitHit", "the limit of variants is not noticed", NeverRaised
    ),
    "BackendCompilerFailed": PrivateName(
        "torch._dynamo.exc:BackendCompilerFailed", "an image is lost where a block's compiler lacks memory", NeverRaised
    ),
    "OptimizedModule": PrivateName(
        "torch._dynamo.eval_frame:OptimizedModule", "a VAE that another node compiles is not noticed", NeverRaised
    ),
    "StopRecomputation": PrivateName(
        "torch.utils.checkpoint:_StopRecomputationError", "gradient checkpointing stops compiled blocks", NeverRaised
    ),
    # A trace, and the graph that comes of it.
    "TracingContext": PrivateName("torch._guards:TracingContext"),
    "tracing": PrivateName("torch._guards:tracing"),
    "detect_fake_mode": PrivateName("torch._guards:detect_fake_mode", "nothing is lowered before PyTorch 2.10", _nothing),
    "OpOverload": PrivateName("torch._ops:OpOverload"),
    "OpOverloadPacket": PrivateName("torch._ops:OpOverloadPacket"),
    "HigherOrderOperator": PrivateName("torch._ops:HigherOrderOperator"),
    "pytree": PrivateName("torch.utils._pytree"),
    "is_traceable_wrapper_subclass": PrivateName("torch.utils._python_dispatch:is_traceable_wrapper_subclass"),
    "lookup_backend": PrivateName("torch._dynamo:lookup_backend"),
    "get_funcname": PrivateName("torch._dynamo.symbolic_convert:get_funcname", _SLOWER_TRACE),
    "profile_guard_manager": PrivateName("torch._dynamo.guards:profile_guard_manager", _SLOWER_TRACE),
    "maybe_has_backedge": PrivateName(
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.maybe_has_backedge",
        "blocks with patches of other nodes are compiled in smaller parts",
        lambda _translator: True,
    ),
    "iter_contains": PrivateName("torch._dynamo.variables.lists:iter_contains", "a model that counts prompts may break"),
    "variables": PrivateName("torch._dynamo.variables", "a model that counts prompts may break"),
    "attribute_of_class": PrivateName("torch._dynamo.variables.user_defined:UserDefinedClassVariable.var_getattr", ""),
    "AttrSource": PrivateName("torch._dynamo.source:AttrSource", "changed attributes of other packs' classes may go unnoticed"),
    "has_primary_context": PrivateName(
        "torch._C:_cuda_hasPrimaryContext", "each GPU of the machine gives some memory to this process", lambda _index: True
    ),
    "function_modes": PrivateName("torch.overrides:_get_current_function_mode_stack", _MODES, list),
    "dispatch_modes": PrivateName("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _MODES, list),
    # Modules of settings. A setting that is missing is not set.
    "dynamo_config": PrivateName("torch._dynamo.config"),
    "shape_config": PrivateName("torch.fx.experimental._config", _RECOMPILES),
    "functorch_config": PrivateName("torch._functorch.config", "a trainer's first step waits twice"),
    "inductor_config": PrivateName("torch._inductor.config", "results may differ more from uncompiled ones"),
    "extern_libs_key": PrivateName("torch.utils._triton:_extern_libs_key", ""),  # before 2.12 keys do not depend on libdevice
    # Inductor.
    "compile_fx": PrivateName("torch._inductor.compile_fx", "inductor is not used"),
    "select_decomp_table": PrivateName("torch._inductor.decomposition:select_decomp_table", _NO_REPLACEMENTS),
    "decomp_table_in_use": PrivateName("torch._inductor.compile_fx:select_decomp_table", _NO_REPLACEMENTS),
    "list_mode_options": PrivateName("torch._inductor:list_mode_options", "every mode is as default", lambda mode: {}),
    "InductorChoices": PrivateName("torch._inductor.choices:InductorChoices", _ONE_PASS),
    "ReductionHint": PrivateName("torch._inductor.runtime.hints:ReductionHint", _ONE_PASS),
    "V": PrivateName("torch._inductor.virtualized:V", _ONE_PASS),
    # Inductor's folders, and modules that the first compilation imports.
    "cache_dir": PrivateName("torch._inductor.runtime.cache_dir_utils:cache_dir", _CACHE, lambda: ""),
    "default_cache_dir": PrivateName("torch._inductor.runtime.cache_dir_utils:default_cache_dir", _CACHE, lambda: ""),
    "maybe_warm_pool": PrivateName("torch._inductor.async_compile:maybe_warm_pool", _CACHE, _nothing),
    "autograd_cache": PrivateName(_AUTOGRAD_CACHE, _CACHE),
    "codegen": PrivateName("torch._inductor.graph", _CACHE),
    "triton_heuristics": PrivateName("torch._inductor.runtime.triton_heuristics", _CACHE),
    "torch_key": PrivateName("torch._inductor.codecache:torch_key", _CACHE, _nothing),
    "triton_hash_with_backend": PrivateName("torch.utils._triton:triton_hash_with_backend", "", _nothing),
    # A graph for another process, and what comes back.
    "ShapeEnv": PrivateName("torch.fx.experimental.symbolic_shapes:ShapeEnv", _IN_CALL),
    "DimDynamic": PrivateName("torch.fx.experimental.symbolic_shapes:DimDynamic", _IN_CALL),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor:FakeTensorMode", _IN_CALL),
    "init_gpu_context": PrivateName("torch._subclasses.fake_tensor:init_gpu_context", "the compile process takes GPU memory"),
    "ConstantSource": PrivateName("torch._dynamo.source:ConstantSource", _IN_CALL),
    "pretty_print_target": PrivateName("torch.fx:Node._pretty_print_target", _IN_CALL),
    "enable_python_dispatcher": PrivateName("torch._dispatch.python:enable_python_dispatcher", _IN_CALL),
    "sympy": PrivateName("sympy", _IN_CALL),
    "sympy_functions": PrivateName("torch.utils._sympy.functions", _IN_CALL),
    "int_oo": PrivateName("torch.utils._sympy.numbers:int_oo", _IN_CALL),
    "sdpa_backends": PrivateName("torch.nn.attention:_cur_sdpa_kernel_backends", _IN_CALL),
    "sdpa_kernel": PrivateName("torch.nn.attention:_sdpa_kernel", _IN_CALL),
    "backend_from_string": PrivateName("torch.nn.attention:_backend_from_string", _IN_CALL),
    "AOTCompiledArtifact": PrivateName("torch._inductor.standalone_compile:AOTCompiledArtifact", _IN_CALL),
    "use_process_pool": PrivateName(
        "torch._inductor.async_compile:AsyncCompile.use_process_pool", "ComfyUI takes half a GiB of memory more"
    ),
    "cpp_kernels": PrivateName(
        "torch._inductor.codecache:CppPythonBindingsCodeCache.cache", "kernels for a CPU may be built once more", {}
    ),
    # Launchers of Triton kernels.
    "run_of_autotuner": PrivateName("torch._inductor.runtime.triton_heuristics:CachingAutotuner.run", _NO_GRAPHS),
    "call_of_launcher": PrivateName("triton.backends.nvidia.driver:CudaLauncher.__call__", _NO_GRAPHS),
    "benchmark_gpu": PrivateName(
        "torch._inductor.runtime.benchmarking:InductorBenchmarker.benchmark_gpu", "steps are slower while kernels are tuned"
    ),
    "sleep_on_gpu": PrivateName("torch.cuda:_sleep", "attention kernels are measured less exactly", _nothing),
    "xpu_is_compiled": PrivateName("torch.xpu:_is_compiled", "Intel GPUs are not named", lambda: False),
}


def __getattr__(name: str) -> Any:
    entry = NAMES.get(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _find(entry)
    return value


def _find(entry: PrivateName) -> Any:
    try:
        return entry.find()
    except Exception as error:  # an import may raise any error
        if entry.without == _IN_CALL:
            raise MissingName(f"PyTorch {torch.__version__} has no {entry.path.replace(':', '.')}") from error
        if entry.without:
            logger.warning("PyTorch %s has no %s: %s (%s)", torch.__version__, entry.path, entry.without, error)
        return entry.instead


@functools.cache
def unsupported() -> str | None:
    """The missing name without which nothing can be compiled, or None."""
    for entry in NAMES.values():
        if entry.without is None:
            try:
                entry.find()
            except Exception:
                return entry.path.replace(":", ".")
    return None


def switched_off() -> str | None:
    """What keeps PyTorch's compiler from doing anything, or None (torch/_dynamo/config.py, eval_frame.py)."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if unsupported() is not None:
        return None
    # A process-wide stance: nothing is compiled, or PyTorch raises instead. If the module is not imported, nobody has set one.
    stance = getattr(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None), "stance", "default")
    if stance != "default":
        return f'torch.compiler.set_stance("{stance}")'
    if not getattr(NAMES["dynamo_config"].find(), "disable", False):
        return None
    return "TORCH_COMPILE_DISABLE=1" if os.environ.get("TORCH_COMPILE_DISABLE") == "1" else "torch._dynamo.config.disable"


def switch(name: str, late: bool = False) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """(read, write) for a name; `read` gives None if it is missing or, with `late`, while its module is not imported: then
    `write` does nothing, as nobody would remove the name again."""
    module, _, path = NAMES[name].path.partition(":")
    owners, _, attribute = path.rpartition(".")

    def owner() -> Any:
        if late and module not in sys.modules:
            return None
        try:
            return pkgutil.resolve_name(f"{module}:{owners}" if owners else module)
        except Exception:
            return None

    def read() -> Any:
        holder = owner()
        return vars(holder).get(attribute) if isinstance(holder, type) else getattr(holder, attribute, None)

    def write(value: Any) -> None:
        if value is not None and read() is not None:
            setattr(owner(), attribute, value)

    return read, write
