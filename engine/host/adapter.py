"""Check once, by signature, which internals of this ComfyUI can be called.

A function that is missing, or whose parameters differ from those listed here, is not called: ComfyUI does that work itself, and
one line in the log says so. An untested ComfyUI costs speed, never an image.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import comfy.cli_args
import comfy.model_management
import torch

from ..log import logger
from ..torch_settings import SharedScope, attribute

KEY = "torch-compile-kit"  # of this pack's wrappers, callbacks and options in a patcher


class PageCalls(NamedTuple):
    """The host's functions that fetch weights of layers under dynamic VRAM (comfy/ops.py, comfy/model_prefetch.py)."""

    cast: Callable  # (layers, dtype, device, bias_dtype, non_blocking): starts the transfers, returns their stream or None
    resolve: Callable  # (layer, dtype, device, bias_dtype, compute_dtype, want_requant): returns weight and bias
    clean_up: Callable  # (layers): unpins the pages of the layers


class Host(NamedTuple):
    """Which internals of this ComfyUI can be used."""

    pages: PageCalls | None  # None: no dynamic VRAM, or its functions have other parameters
    traceable_cast: bool  # `comfy.ops.cast_bias_weight` takes the arguments of `weights/traceable_layers.py`
    list_of_layers: bool  # `ModelPatcher._load_list` takes the arguments of `weights/placement.py`
    unknown: tuple[str, ...]  # log lines: which feature is not used, and what that costs


def takes(function: object, *names: str) -> bool:
    """Whether the first parameters of `function` are `names`, and all other parameters are optional."""
    if not callable(function):
        return False
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    others = [p for p in parameters[len(names) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = [p.name for p in parameters[: len(names)] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return first == list(names) and all(p.default is not p.empty for p in others)


def version() -> str:
    return getattr(_module("comfyui_version"), "__version__", "(unknown)")


@functools.cache
def host() -> Host:
    """Call `look` once, and log each feature that is not used."""
    checked = look()
    for text in checked.unknown:
        logger.warning("untested ComfyUI version %s: %s", version(), text)
    return checked


def look() -> Host:
    """Check the imported `comfy`; not cached."""
    ops, patching = _module("comfy.ops"), _module("comfy.model_patcher")
    pages, unknown = _page_calls(), []
    if pages is None and hasattr(patching, "ModelPatcherDynamic"):  # this ComfyUI has dynamic VRAM
        unknown.append("ComfyUI itself fetches weights under dynamic VRAM, layer by layer, which breaks the graphs of blocks.")
    cast = takes(getattr(ops, "cast_bias_weight", None), "s", "input", "dtype", "device", "bias_dtype")
    if not cast:
        unknown.append("quantised layers are cast by ComfyUI alone, which may break the graphs of blocks.")
    load_list = getattr(getattr(patching, "ModelPatcher", None), "_load_list", None)
    ordered = load_list is None or takes(load_list, "self", "for_dynamic") or takes(load_list, "self")
    management = _module("comfy.model_management")
    ordered &= all(
        callable(getattr(management, n, None)) for n in ("get_free_memory", "minimum_inference_memory", "module_size")
    )
    if not ordered:
        unknown.append("which weights stay on the GPU is left to ComfyUI.")
    return Host(pages, cast, load_list is not None and ordered, tuple(unknown))


def _page_calls() -> PageCalls | None:
    ops, prefetch = _module("comfy.ops"), _module("comfy.model_prefetch")
    cast: Any = getattr(ops, "cast_modules_with_vbar", None)
    resolve: Any = getattr(ops, "resolve_cast_module_with_vbar", None)
    clean_up: Any = getattr(prefetch, "cleanup_prefetched_modules", None)
    if takes(clean_up, "module", "comfy_modules"):  # since 0.33.1; `module` is the block whose page range is pinned
        clean_up = functools.partial(clean_up, None)
    elif not takes(clean_up, "comfy_modules"):
        return None
    management = _module("comfy.model_management")
    page = _module("comfy_aimdo.model_vbar")
    complete = (
        takes(cast, "comfy_modules", "dtype", "device", "bias_dtype", "non_blocking")
        and takes(resolve, "s", "dtype", "device", "bias_dtype", "compute_dtype", "want_requant")
        and takes(getattr(management, "sync_stream", None), "device", "stream")
        and all(callable(getattr(page, f"vbar_{name}", None)) for name in ("fault", "unpin", "signature_compare"))
        and all(callable(getattr(management, name, None)) for name in ("get_offload_stream", "current_stream"))
        and isinstance(getattr(ops, "QuantizedTensor", None), type)
    )
    return PageCalls(cast, resolve, clean_up) if complete else None


def device_type() -> str:
    """The type of the device on which models run: "cuda", "cpu" or another of PyTorch's."""
    return comfy.model_management.get_torch_device().type


def makes_room() -> bool:
    """Whether comfy-aimdo is active in PyTorch's allocator, so that an allocation can evict weights from the device."""
    return getattr(_module("comfy.memory_management"), "aimdo_enabled", False)


def forbids_threads() -> bool:
    """Whether a second thread that uses the GPU could deadlock the process.

    With `--verbose DEBUG` comfy-aimdo logs each allocation through Python, inside PyTorch's allocator. The allocating thread
    waits there for the GIL, and the GIL's holder may wait for the allocator (in `torch.cuda.memory_stats`, called by the host).
    """
    return makes_room() and logging.getLogger().isEnabledFor(logging.DEBUG)


def _module(name: str) -> object | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def set_callbacks(patcher: Any, key: str, callbacks: dict[str, Any]) -> None:
    """Register `callbacks` (event -> function) with the patcher; replaces callbacks for these events under `key`."""
    for event, callback in callbacks.items():
        patcher.remove_callbacks_with_key(event, key)
        patcher.add_callback_with_key(event, key, callback)


# ComfyUI's own compiler (0.34 and later) plans the memory of a whole model call and captures CUDA graphs around its blocks. The
# work of this pack is in neither: allocations outside that plan (compiling, autotuning) end in "aimdo memory compile error".
# Each call of a model reads this option (comfy/model_prefetch.py, `malloc_graph_enabled`).
_compiler_scope = SharedScope({"off": attribute(comfy.cli_args.args, "disable_comfy_compiler")})


def without_hosts_compiler() -> AbstractContextManager:
    """A context in which model calls do not start ComfyUI's own compiler; does nothing on a host without that compiler."""
    if not hasattr(comfy.cli_args.args, "disable_comfy_compiler"):
        return nullcontext()
    return _compiler_scope.applied(off=True)


def without_prefetch(network: torch.nn.Module) -> AbstractContextManager:
    """A context in which the host prefetches no block of `network` (comfy/model_prefetch.py): `BlockWeights` prefetches blocks,
    and weights that both of them fetch would be copied twice. A hook clears the option in each call, as the host sets it in
    each call (comfy/model_base.py, `_apply_model`)."""

    def switch_off(_network: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
        options = kwargs.get("transformer_options")
        if options:
            options["prefetch_dynamic_vbars"] = False

    return network.register_forward_pre_hook(switch_off, with_kwargs=True)
