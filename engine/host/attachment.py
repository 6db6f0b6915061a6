"""Attach compile settings to a ComfyUI model patcher."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import comfy.model_management
from comfy.patcher_extension import WrappersMP

from ..binding import compiled_blocks, plan_for
from ..compiled_kind import shapes_of
from ..discovery import BlockPlan
from ..monitor import watching
from ..scopes import sampling_scope, sampling_switches
from ..settings import CompileSettings

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
        with ExitStack() as scopes:
            scopes.enter_context(watching)
            switches = sampling_switches(settings.allow_tf32, settings.cudnn_benchmark)
            if switches:
                scopes.enter_context(sampling_scope.holding(**switches))
            model = executor.class_obj.diffusion_model
            inputs = shapes_of(tuple(args), kwargs)
            scopes.enter_context(compiled_blocks(model, settings, _raise_if_interrupted, inputs))
            return executor(*args, **kwargs)


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
