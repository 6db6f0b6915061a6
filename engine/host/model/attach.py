"""Attach compile settings to a ComfyUI model patcher."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from contextlib import ExitStack

import comfy.model_management
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...background.gate import gate
from ...background.model_call import ModelCall, submit
from ...background.thread import compiler
from ...blocks.discovery import BlockPlan
from ...compile.binding import Binding, plan_for
from ...compile.events import monitor, watching
from ...compile.registry import code_of, uncalled_in_words
from ...cuda_graphs.capture import graphs_of
from ...inductor import rotary_norms as opened_kernels
from ...inductor.attention_kernels import in_words
from ...notices.recompile_log import is_warming, report_compilation, watch_of
from ...notices.report import stats_for
from ...settings import CompileSettings
from ...torch_settings import sampling_scope, sampling_switches
from ..adapter import forbids_threads, makes_room, without_hosts_compiler, without_prefetch
from ..graphs import payoff as graph_payoff
from ..graphs.replay import forget_graphs, graphed, graphs_summary, new_run, no_graphs, note, turns_convolutions
from ..weights import blocks as weights
from ..weights.partial_load import release_buffers
from ..weights.placement import keep_even, keep_host_order, spread_weights
from ..weights.quantized import traceable_casts
from .attention_choice import chosen_kernel, with_attention
from .call_info import call_info_of
from .user_folder import get_ready

KEY = "torch-compile-kit"
logger = logging.getLogger(KEY)


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of whatever model runs inside it.

    It keeps no model, so that clones, reloads and multi-GPU copies, which share this object, cannot cross
    (comfy/model_base.py, `apply_model`).
    """

    def __init__(self, settings: CompileSettings):
        self.settings = settings
        self.notes: list[str] = []

    def __call__(self, executor, *args, **kwargs):
        settings = self.settings
        base_model = executor.class_obj
        device = args[0].device
        with ExitStack() as scopes:
            scopes.enter_context(watching)
            scopes.enter_context(without_hosts_compiler())
            switches = sampling_switches(settings.allow_tf32, settings.cudnn_benchmark)
            if switches:
                scopes.enter_context(sampling_scope.holding(**switches))
            weights_of = functools.partial(weights.weights_of, base_model, settings.block_swap, device)
            call = ModelCall(settings.waits or is_warming() or self._must_wait(), raise_if_interrupted)
            network = base_model.diffusion_model
            args, measure = with_attention(settings.attention, executor, tuple(args), kwargs, call.waits)
            if measure is not None:
                result = executor(*args, **kwargs)
                measure()
                code_of(network).eager_calls += 1
                return result
            scopes.enter_context(traceable_casts(network))
            code = code_of(network)
            obstacle = no_graphs(device) if settings.may_have_graphs else ""
            possible = settings.may_have_graphs and obstacle is None
            if obstacle and settings.wants_graphs:
                note(self.notes, obstacle)
            pays = settings.wants_graphs or (graph_payoff.recall(network) if possible else False)
            if possible and pays is None:
                code.eager_calls += 1
                return graph_payoff.measure(network, lambda: executor(*args, **kwargs))
            # Until all code is there calls are replayed as well: beside a thread that compiles, launching kernels is slow.
            graphs = possible and (pays or not (call.waits or code.settled))
            if possible and not graphs and graphs_of(network).graphs:
                graphs_of(network).drop()
            binding = Binding(network, settings, call, weights_of)
            if not graphs and binding.paged:
                scopes.enter_context(without_prefetch(network))
            scopes.enter_context(graphed(network, binding, device, self.notes) if graphs else binding.bound())
            compilations = monitor.compilations
            try:
                result = executor(*args, **kwargs)
            except BaseException:  # what a run compiled that was stopped is not news in the next one
                watch_of(network).added(settings.settings_key(), stats_for(network, settings))
                raise
            code.eager_calls += bool(call.eager)
            if call.ran or code.uncalled:
                code.settled = not call.eager and not code.is_being_compiled
            if graphs or not possible:
                submit(call.requests)  # else the next call requests again, and is captured
            if not possible:
                gate.open()
            if monitor.compilations != compilations or is_warming():
                added = watch_of(network).added(settings.settings_key(), stats_for(network, settings))
                info = call_info_of(base_model, settings, args, kwargs)
                report_compilation(network, type(base_model).__name__, info, added, settings.dynamic)
            return result

    def _must_wait(self) -> bool:
        if not forbids_threads():
            return False
        note(self.notes, "Compiled at once: with --verbose DEBUG ComfyUI's memory manager bears no thread in the background.")
        return True


def attach(patcher, settings: CompileSettings):
    """A clone of `patcher` whose blocks run compiled; `patcher` itself when the backend is `none`.

    Raises:
        InvalidSetting: the machine lacks what a setting needs, or a pattern of `only_blocks` matches nothing.
    """
    if not settings.enabled:
        return patcher
    settings.check_backend()
    opened_kernels.register()
    compiler.makes_room = makes_room
    plan = compile_plan(patcher, settings)
    get_ready(settings)
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, BlockCompiler(settings))
    clone.remove_wrappers_with_key(WrappersMP.PREPARE_SAMPLING, KEY)
    keep_host_order(clone)
    clone.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, KEY)
    clone.add_callback_with_key(CallbacksMP.ON_CLEANUP, KEY, _clean_up)
    if settings.block_swap == "auto":
        clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, KEY, spread_weights)
        keep_even(clone)
    for event, action in ((CallbacksMP.ON_PRE_RUN, _new_run), (CallbacksMP.ON_DETACH, forget_graphs)):
        clone.remove_callbacks_with_key(event, KEY)
        clone.add_callback_with_key(event, KEY, _on_network(action))
    logger.info("%s: %s; %s", model_name(patcher), settings.describe(), plan.summary())
    return clone


def eager_clone(patcher):
    """A clone of `patcher` that compiles nothing, takes no attention kernel of ours and sets no switch.

    LoRA, patches and whatever else it carries stay. So does what places the weights: under partial loading two orders in turn
    would have the host load the weights anew at each change (see `host/weights/placement.py`).
    """
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    return clone


def _clean_up(patcher) -> None:
    """After each sampling run, also after one that failed."""
    gate.close()
    release_buffers()
    weights.forget_weights(patcher.model)


def _new_run(network, *args: object) -> None:
    gate.close()
    code_of(network).new_run()
    new_run(network, *args)


def _on_network(action):
    return lambda patcher, *args: action(diffusion_model(patcher), *args)


def notes_about(patcher) -> list[str]:
    """What the report says beside the counts: weights, attention, CUDA graphs."""
    network = diffusion_model(patcher)
    notes = list(weights.notes_on(patcher.model))
    chosen = chosen_kernel(network, attached_settings(patcher).attention)
    if chosen is not None:
        notes.append(f"Attention: {in_words(chosen)}.")
    notes += graphs_summary(network)
    code = code_of(network)
    if code.left_out:
        turned = graphs_of(network).captures and turns_convolutions(network)
        notes.append(
            f"Blocks of convolutions ({_counted(code.left_out)}) stay uncompiled, as they take most of the compile time"
            f"{'; in CUDA graphs they run channels_last' if turned else ''}."
        )
    if code.left_out and code.too_small:
        notes.append(f"So do blocks at which compiling would save little ({_counted(code.too_small)}).")
    if code.uncalled:
        notes.append(uncalled_in_words(code.uncalled))
    if code.eager_calls:
        notes.append(f"{code.eager_calls} steps ran uncompiled while code was made in the background.")
    if compiler.busy:
        notes.append("More code is being made in the background.")
    return notes + [note for wrapper in patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY) for note in wrapper.notes]


def _counted(classes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in classes.items())


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


def raise_if_interrupted() -> None:
    """Stop here when the user has pressed cancel."""
    # The host polls before every layer, but not inside compiled code (comfy/ops.py, run_every_op).
    comfy.model_management.throw_exception_if_processing_interrupted()
