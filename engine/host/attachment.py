"""Attach compile settings to a ComfyUI model patcher."""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack

import comfy.model_management
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..attention import override_for
from ..binding import compiled_blocks, plan_for
from ..compiled_kind import shapes_of
from ..discovery import BlockPlan
from ..monitor import watching
from ..scopes import sampling_scope, sampling_switches
from ..settings import CompileSettings
from . import weights
from .placement import order_paged_weights
from .streaming import release_buffers

# transformer_options among the arguments of `apply_model(x, t, c_concat, c_crossattn, control, transformer_options)`
OPTIONS_AT = 5
KEY = "torch-compile-kit"
logger = logging.getLogger(KEY)


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of whatever model runs inside it.

    It keeps no model, so that clones, reloads and multi-GPU copies, which share this object, cannot cross
    (comfy/model_base.py, `apply_model`).
    """

    def __init__(self, settings: CompileSettings):
        self.settings = settings

    def __call__(self, executor, *args, **kwargs):
        settings = self.settings
        base_model = executor.class_obj
        device = args[0].device
        with ExitStack() as scopes:
            scopes.enter_context(watching)
            switches = sampling_switches(settings.allow_tf32, settings.cudnn_benchmark)
            if switches:
                scopes.enter_context(sampling_scope.holding(**switches))
            weights_of = None
            if settings.block_swap == "auto":
                weights_of = functools.partial(weights.weights_of, base_model, device=device)
            inputs = shapes_of(tuple(args), kwargs)
            scopes.enter_context(
                compiled_blocks(base_model.diffusion_model, settings, _raise_if_interrupted, inputs, weights_of)
            )
            return executor(*self._with_attention(args), **kwargs)

    def _with_attention(self, args: tuple) -> tuple:
        """The arguments of apply_model, with our attention kernel unless the user or another node has chosen one."""
        override = override_for(self.settings.attention)
        options = args[OPTIONS_AT] if len(args) > OPTIONS_AT else None
        if override is None or options is None or "optimized_attention_override" in options:
            return args
        return (*args[:OPTIONS_AT], {**options, "optimized_attention_override": override}, *args[OPTIONS_AT + 1 :])


def attach(patcher, settings: CompileSettings):
    """A clone of `patcher` whose blocks run compiled; `patcher` itself when the backend is `none`.

    Raises:
        InvalidSetting: the backend is not installed, or a pattern of `only_blocks` matches nothing.
    """
    if not settings.enabled:
        return patcher
    settings.check_backend()
    plan = compile_plan(patcher, settings)
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, BlockCompiler(settings))
    if settings.block_swap == "auto":
        clone.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)
        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, order_paged_weights)
        clone.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
        clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, lambda _patcher: release_buffers())
    logger.info("%s: %s; %s", model_name(patcher), settings.describe(), plan.summary())
    return clone


def attached_settings(patcher) -> CompileSettings | None:
    """The settings of the Torch Compile Model node upstream, if there is one."""
    for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
        return wrapper.settings
    return None


def compile_plan(patcher, settings: CompileSettings) -> BlockPlan:
    """The blocks that `settings` compiles in the model of `patcher`."""
    return plan_for(diffusion_model(patcher)).select(settings.patterns)


def diffusion_model(patcher):
    """The network inside the host's model."""
    return patcher.model.diffusion_model


def model_name(patcher) -> str:
    return type(patcher.model).__name__


def _raise_if_interrupted() -> None:
    # The host polls before every layer, but not inside compiled code (comfy/ops.py, run_every_op).
    comfy.model_management.throw_exception_if_processing_interrupted()
