"""Attach compile settings to a ComfyUI model patcher."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.utils
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ... import attention_kernels
from ...background.thread import compiler
from ...blocks.discovery import BlockPlan
from ...compile.binding import plan_for
from ...compile.eager import Eager
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...log import logger
from ...messages.status import Line, Status, forget_line, tell_all
from ...messages.words import ENGLISH, in_words
from ...settings import CompileSettings
from ..adapter import KEY, set_callbacks
from ..graphs.replay import graphs_summary, new_run, runs_channels_last
from ..weights.blocks import notes_on
from ..weights.placement import EvenLoad, override_methods, spread_weights
from .attention_choice import check_fullgraph, chosen_kernel
from .network_calls import begin_run, end_run, prepare_replays
from .training import free_trained, train_compiled
from .user_folder import get_ready
from .wrapper import BlockCompiler, install_apply_model, obstacle, uninstall_apply_model


def attach(patcher, settings: CompileSettings, node: str | None = None):
    """A clone of `patcher` whose blocks run compiled; `patcher` itself when the backend is `none`.

    The page shows the progress in the node whose id is `node`.

    Raises:
        InvalidSetting: the machine lacks what a setting needs, or a pattern of `only_blocks` matches nothing.
    """
    if not settings.enabled:
        forget_line(node)
        return patcher
    why = _obstacle_of(patcher)
    if why is not None:
        return _uncompiled(patcher, why, node)
    plan = compile_plan(patcher, settings)
    prepare_compiling(settings)
    clone = eager_clone(patcher)
    status = Status(node, settings) if node is not None else None
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, BlockCompiler(clone.model, settings, status))
    clone.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)
    if settings.block_swap == "auto":
        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, spread_weights)
        override_methods(clone, EvenLoad)
    callbacks = {
        CallbacksMP.ON_CLEANUP: _clean_up,
        CallbacksMP.ON_PRE_RUN: _begin_run,
        CallbacksMP.ON_PREPARE_STATE: _begin_step,
        CallbacksMP.ON_LOAD: _on_load,
        CallbacksMP.ON_CLONE: functools.partial(train_compiled, settings),
    }
    set_callbacks(clone, KEY, callbacks)
    prepare_replays(settings, diffusion_model(patcher), patcher.load_device)
    code_of(diffusion_model(patcher)).title = model_name(patcher)
    logger.info("%s: %s; %s", model_name(patcher), settings.describe(), plan.summary())
    return clone


def _obstacle_of(patcher) -> list | None:
    return obstacle(diffusion_model(patcher), patcher.wrappers)


def _uncompiled(patcher, why: list, node: str | None):
    """A clone that runs as `patcher` does; the node's line says why."""
    clone = patcher.clone()
    clone.set_attachments(KEY, why)
    line = Line(node)
    line.put("pytorch", why)
    set_callbacks(clone, f"{KEY}.line", {CallbacksMP.ON_PRE_RUN: lambda _patcher: line.new_run()})
    logger.warning("%s is %s", model_name(patcher), in_words(why, ENGLISH))
    return clone


def prepare_compiling(settings: CompileSettings) -> None:
    """Prepare for compiling under `settings`; a second call costs nothing.

    Raises:
        InvalidSetting: the machine, or the host as it was started, lacks what a setting needs.
    """
    settings.check_backend()
    check_fullgraph(settings)
    compiler.after_work = tell_all
    get_ready(settings)


def eager_clone(patcher):
    """A clone of `patcher` that compiles nothing, takes no attention kernel of ours and sets no switch.

    LoRA, patches and the placement of weights (`host/weights/placement.py`) stay: both sides of a benchmark wait for the same
    weights.
    """
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    return clone


def _clean_up(patcher) -> None:
    uninstall_apply_model(patcher)
    end_run(patcher.model)
    for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
        wrapper.end_run()


def _begin_run(patcher, *_: object) -> None:
    free_trained()
    wrappers = patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    for wrapper in wrappers:
        wrapper.begin_run()
    begin_run(diffusion_model(patcher), *(wrapper.status for wrapper in wrappers))
    install_apply_model(patcher)


def _begin_step(patcher, *_: object) -> None:
    """An ON_PREPARE_STATE callback: called in each step before the model, or another pack's wrapper around the model, runs."""
    for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
        wrapper.is_sampled = True


def _on_load(patcher, *_: object) -> None:
    """An ON_LOAD callback: weights may have moved, also in the middle of a run, as a ControlNet's VAE may need memory."""
    new_run(diffusion_model(patcher))


def notes_about(patcher) -> list[str]:
    """What the report says beside the counts: weights, attention, CUDA graphs."""
    network, settings = diffusion_model(patcher), attached_settings(patcher)
    notes = [*notes_on(patcher.model)]
    chosen = chosen_kernel(network, settings.attention) if settings is not None else None
    if chosen is not None:
        notes.append(f"Attention: {attention_kernels.in_words(chosen)}.")
    notes += graphs_summary(network)
    code = code_of(network)
    notes += code.eager_in_words()
    if code.eager[Eager.CONVOLUTIONS] and graphs_of(network).captures and runs_channels_last(network):
        notes.append("In CUDA graphs the blocks of convolutions run channels_last.")
    if code.eager_calls:
        notes.append(f"{code.eager_calls} calls of the model ran uncompiled so far.")
    if compiler.makes_code:
        notes.append("More blocks are being compiled in the background.")
    return notes + [note for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY) for note in wrapper.notes]


def attached_settings(patcher) -> CompileSettings | None:
    """The settings of the Torch Compile node upstream, if there is one."""
    return next((wrapper.settings for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)), None)


def settings_for(patcher, no_node: str) -> CompileSettings | str:
    """The settings of the Torch Compile node upstream; a sentence where nothing is compiled.

    Args:
        no_node: the sentence for a model that comes from no Torch Compile node.
    """
    settings = attached_settings(patcher)
    if settings is not None or patcher.get_attachment(KEY) is not None:
        why = _obstacle_of(patcher)
        if why is not None:
            return f"Torch Compile: {in_words(why)}"
    return settings or no_node


def compile_plan(patcher, settings: CompileSettings) -> BlockPlan:
    with _as_built(patcher):
        plan = plan_for(diffusion_model(patcher))
        return plan.select(settings.patterns) if plan.blocks else plan  # else the search failed, which was logged


@contextmanager
def _as_built(patcher) -> Iterator[None]:
    """A context in which the model lacks the object patches of the previous prompt, which the host removes only when it loads
    the model again."""
    backups = [(name, value) for name, value in patcher.object_patches_backup.items() if name.startswith("diffusion_model.")]
    patches = [(name, comfy.utils.set_attr(patcher.model, name, value)) for name, value in backups]
    try:
        yield
    finally:
        for name, patch in reversed(patches):
            comfy.utils.set_attr(patcher.model, name, patch)


def diffusion_model(patcher):
    return patcher.get_model_object("diffusion_model")  # `patcher.model` may hold another clone's patch until the host loads it


def model_name(patcher) -> str:
    """The name of ComfyUI's configuration (SD15, SDXL, Flux), as several models share a class."""
    return type(getattr(patcher.model, "model_config", patcher.model)).__name__
