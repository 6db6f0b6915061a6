"""What this host is: the internals of ComfyUI that we call, looked at once, by what they take.

A function that is not there, or takes other arguments than those known here, is not called: the host then does that work in its
own way, and one line in the log says so. An unknown host costs speed, never an image.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import comfy.cli_args
import comfy.model_management
import torch

from ..torch_settings import SharedScope

logger = logging.getLogger("torch-compile-kit")


@dataclass(frozen=True)
class PageCalls:
    """How layers under dynamic VRAM get their weights (comfy/ops.py, comfy/model_prefetch.py).

    Args:
        cast: `(layers, dtype, device, bias_dtype, non_blocking)`, starts the transfers and returns their stream or None.
        resolve: `(layer, dtype, device, bias_dtype, compute_dtype, want_requant)`, returns weight and bias.
        clean_up: `(layers)`, unpins their pages.
    """

    cast: Callable
    resolve: Callable
    clean_up: Callable


@dataclass(frozen=True)
class Host:
    """What of the host we know how to use.

    Args:
        pages: None where dynamic VRAM is not there, or is not as we know it.
        traceable_cast: `comfy.ops.cast_bias_weight` takes what `host/weights/traceable_layers.py` gives it.
        list_of_layers: `ModelPatcher._load_list` takes what `host/weights/placement.py` gives it.
        unknown: for the log, what is not used and what that means.
    """

    pages: PageCalls | None
    traceable_cast: bool
    list_of_layers: bool
    unknown: tuple[str, ...]


def takes(function: object, *names: str) -> bool:
    """Whether the first parameters of `function` are these, all others may be left out."""
    if not callable(function):
        return False
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # no Python function
        return False
    others = [p for p in parameters[len(names) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = [p.name for p in parameters[: len(names)] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return given == list(names) and all(p.default is not p.empty for p in others)


@functools.cache
def host() -> Host:
    """Looked at when first asked, and said in the log if something is not as known."""
    found = look()
    for text in found.unknown:
        logger.warning("this ComfyUI (%s) is none that this pack knows: %s", _version(), text)
    return found


def look() -> Host:
    """What the loaded `comfy` offers, without remembering it."""
    ops, patcher = _module("comfy.ops"), _module("comfy.model_patcher")
    pages, unknown = _page_calls(), []
    if pages is None and _has_pages():
        unknown.append("weights under dynamic VRAM are fetched by ComfyUI, layer by layer, which breaks the graphs of blocks.")
    cast = takes(getattr(ops, "cast_bias_weight", None), "s", "input", "dtype", "device", "bias_dtype")
    if not cast:
        unknown.append("quantised layers are cast by ComfyUI alone, which may break the graphs of blocks.")
    load_list = getattr(getattr(patcher, "ModelPatcher", None), "_load_list", None)
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
    if takes(clean_up, "module", "comfy_modules"):  # from 0.33.1 on; the first is the block whose page range is pinned
        clean_up = functools.partial(clean_up, None)
    elif not takes(clean_up, "comfy_modules"):
        return None
    management = _module("comfy.model_management")
    page = _module("comfy_aimdo.model_vbar")
    known = (
        takes(cast, "comfy_modules", "dtype", "device", "bias_dtype", "non_blocking")
        and takes(resolve, "s", "dtype", "device", "bias_dtype", "compute_dtype", "want_requant")
        and takes(getattr(management, "sync_stream", None), "device", "stream")
        and all(callable(getattr(page, f"vbar_{name}", None)) for name in ("fault", "unpin", "signature_compare"))
        and all(callable(getattr(management, name, None)) for name in ("get_offload_stream", "current_stream"))
        and isinstance(getattr(ops, "QuantizedTensor", None), type)
    )
    return PageCalls(cast, resolve, clean_up) if known else None


def _has_pages() -> bool:
    """Whether the host has dynamic VRAM of any kind."""
    return hasattr(_module("comfy.model_patcher"), "ModelPatcherDynamic")


def device_type() -> str:
    """Of where models run: "cuda", "cpu" or another of PyTorch's."""
    return comfy.model_management.get_torch_device().type


def makes_room() -> bool:
    """Whether weights leave the device when anybody asks PyTorch for memory: comfy-aimdo is at work in its allocator."""
    return getattr(_module("comfy.memory_management"), "aimdo_enabled", False)


def forbids_threads() -> bool:
    """Whether a second thread that uses the GPU could stop the process for good.

    With `--verbose DEBUG` comfy-aimdo logs each allocation, through Python, inside PyTorch's allocator: it waits there for
    Python's lock, and whoever has that may wait for the allocator (`torch.cuda.memory_stats`, which the host calls).
    """
    return makes_room() and logging.getLogger().isEnabledFor(logging.DEBUG)


def _module(name: str) -> object | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _version() -> str:
    return getattr(_module("comfyui_version"), "__version__", "of an unknown version")


# ComfyUI's own compiler (0.34 and later) plans the memory of a whole model call and records CUDA graphs around its blocks, from
# which ours would be missing: allocations that it did not plan (compiling, autotuning) end in "aimdo memory compile error". It
# looks at this option in each call of a model (comfy/model_prefetch.py, `malloc_graph_enabled`).
_compiler_scope = SharedScope(
    {
        "off": (
            lambda: comfy.cli_args.args.disable_comfy_compiler,
            lambda value: setattr(comfy.cli_args.args, "disable_comfy_compiler", value),
        )
    }
)


def without_hosts_compiler() -> AbstractContextManager:
    """While it lasts, ComfyUI's own compiler starts for no model call; nothing on a host that has none."""
    if not hasattr(comfy.cli_args.args, "disable_comfy_compiler"):
        return nullcontext()
    return _compiler_scope.applied(off=True)


def without_prefetch(network: torch.nn.Module) -> AbstractContextManager:
    """While it lasts, the host fetches no block of `network` ahead (comfy/model_prefetch.py): our weights do, and what both
    fetch is copied twice. The host sets the option anew in each call (comfy/model_base.py, `_apply_model`)."""

    def switch_off(_network: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
        options = kwargs.get("transformer_options")
        if options:
            options["prefetch_dynamic_vbars"] = False

    return network.register_forward_pre_hook(switch_off, with_kwargs=True)
