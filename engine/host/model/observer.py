"""Report each call of a model: on the node's line, in notices of what was compiled, and to a warmup."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...background.thread import compiler
from ...compile.binding import blocks_of
from ...compile.call_shapes import shapes_of
from ...compile.registry import WaitsFor, code_of
from ...compile.session import monitor
from ...cuda_graphs.capture import graphs_of
from ...messages.recompile_log import CallInfo, is_warming, report_compilation, watch_of
from ...messages.report import stats_for
from ...messages.status import Status
from ...settings import CompileSettings
from ...transformer_options.filter import PATCHES
from .attention_choice import OPTIONS_AT, is_being_prepared
from .network_calls import are_training, is_synchronous


@contextmanager
def observed(settings: CompileSettings, status: Status | None, base_model, args: tuple, kwargs: dict) -> Iterator[None]:
    """A context that reports one call `apply_model(*args, **kwargs)`; `status`: the node's line, if there is one."""
    network, compilations = base_model.diffusion_model, monitor.compilations
    watch, key = watch_of(network), settings.settings_key()
    is_told_elsewhere = is_copy_for_another_device(base_model)
    with nullcontext() if status is None or is_told_elsewhere else _step(settings, status, base_model, args, kwargs):
        try:
            yield
        except BaseException:  # count code of this call now, so that the next run does not report it
            watch.added(key, stats_for(network, settings))
            raise
        if (monitor.compilations != compilations or is_warming()) and not are_training(network, args[0]):
            added = watch.added(key, stats_for(network, settings))
            if is_synchronous(settings):  # otherwise the sampler has not waited for code
                info, node = call_info_of(base_model, settings, args, kwargs), status.node if status is not None else None
                report_compilation(network, type(base_model).__name__, info, added, settings, node)


@contextmanager
def _step(settings: CompileSettings, status: Status, base_model, args: tuple, kwargs: dict) -> Iterator[None]:
    """A context for a call that is a step, or a part of one: the line compares its seconds with those of other steps."""
    network, x, options = base_model.diffusion_model, args[0], args[OPTIONS_AT]
    code, graphs = code_of(network), graphs_of(network)
    inputs = str(x.shape), shapes_of(args[2:4], kwargs), args[4] is not None, patches_in(options)
    status.begins(network, options.get("sigmas"), inputs)  # the sampler creates one object `sigmas` per step
    made, waits, eager_calls = (monitor.compilations, graphs.captures + graphs.checks), compiler.awaited, code.eager_calls
    mixed = code.mixed
    try:
        yield
    except BaseException:
        status.stopped()
        raise
    is_eager = code.eager_calls > eager_calls
    # On a CPU the compiler, or its import, takes cores from an eager step, which makes compiled steps look too good.
    beside = is_eager and x.device.type == "cpu"
    beside |= code.mixed > mixed  # neither compiled nor uncompiled
    beside |= code.waits_for is WaitsFor.IMPORT or is_being_prepared(network)  # such steps are slower than without this pack
    status.ends(is_eager, waits or beside or (monitor.compilations, graphs.captures + graphs.checks) != made)
    sizes = watch_of(network).sizes
    if not is_eager and not code.replays_operators and x.shape not in sizes:
        sizes[x.shape] = call_info_of(base_model, settings, args, kwargs).size()


def is_copy_for_another_device(base_model) -> bool:
    """Whether this is a copy for another GPU (MultiGPU CFG Split, comfy/multigpu.py): the first GPU's model reports steps."""
    return getattr(getattr(base_model, "current_patcher", None), "is_multigpu_base_clone", False)


def call_info_of(base_model, settings: CompileSettings, args: tuple, kwargs: dict) -> CallInfo:
    """Describe in units of the nodes a call `apply_model(x, t, c_concat, c_crossattn, control, transformer_options)`."""
    shape = args[0].shape
    ratio = getattr(base_model.latent_format, "spacial_downscale_ratio", 8)
    frames = getattr(base_model.latent_format, "temporal_downscale_ratio", 1)
    options, context = args[OPTIONS_AT], args[3]
    prompts_per_call = max(1, len(options.get("cond_or_uncond", ())))
    inputs = {"concat latent": args[2], **kwargs}
    shapes = {name: shapes_of((value,), {}) for name, value in inputs.items()}
    shapes = {name: tuple(tuple(s)[1:] if isinstance(s, torch.Size) else s for s in sizes) for name, sizes in shapes.items()}
    return CallInfo(
        width=shape[-1] * ratio if len(shape) >= 4 else 0,
        height=shape[-2] * ratio if len(shape) >= 4 else 0,
        length=(shape[2] - 1) * frames + 1 if len(shape) == 5 else 1,
        batch=shape[0] // prompts_per_call,
        prompts_per_call=prompts_per_call,
        tokens=context.shape[1] if context is not None and context.dim() >= 2 else 0,
        controlnet=args[4] is not None,
        inputs=tuple(sorted((name, sizes) for name, sizes in shapes.items() if sizes)),
        patches=patches_in(options),
        layers=_exchanged_layers(base_model.diffusion_model, settings),
    )


def patches_in(options: Mapping) -> tuple[str, ...]:
    """The kinds of patches in a call's `transformer_options`."""
    return tuple(sorted({name for kind in PATCHES for name, patch in (options.get(kind) or {}).items() if patch}))


def _exchanged_layers(network, settings: CompileSettings) -> tuple[str, ...]:
    """Names of the forwards that other nodes have given to layers inside blocks."""
    states = [state for block in blocks_of(network, settings) if (state := code_of(network).state_of(block)) is not None]
    codes: set[Any] = {codes[0] for state in states for _, codes in state.forwards}
    return tuple(sorted({c.__qualname__ if isinstance(c, type) else getattr(c, "co_qualname", c.co_name) for c in codes}))
