"""Wrap the host's `apply_model`: choose how each call of a diffusion model runs, and tell what it compiled."""

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP

from ...background.thread import compiler
from ...blocks.discovery import unwrapped
from ...compile.binding import blocks_of
from ...compile.call_shapes import shapes_of
from ...compile.registry import WaitsFor, code_of
from ...compile.session import monitor
from ...cuda_graphs.capture import graphs_of
from ...log import logger
from ...messages.recompile_log import CallInfo, is_warming, report_compilation, watch_of
from ...messages.report import stats_for
from ...messages.status import Status
from ...messages.words import COMPILED_ELSEWHERE, ENGLISH, in_words
from ...ownership import is_compiled_elsewhere
from ...settings import CompileSettings
from ..graphs.policy import always_replays
from ..weights.blocks import Loaded
from .attention_choice import OPTIONS_AT, is_being_prepared, with_attention
from .network_calls import NetworkCalls, are_training, eager
from .payback import payback_of
from .training import TRAINING, begin_step

KEY = "torch-compile-kit"  # of our wrapper in a patcher
# Under it ComfyUI's node TorchCompileModel and KJNodes wrap `apply_model` (comfy_api/torch_helpers/torch_compile.py): inside,
# the model, or each of its blocks, is PyTorch's OptimizedModule.
COMPILE_KEY = "torch.compile"


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of the model that `executor` runs.

    A BlockCompiler keeps no model: clones, reloads and multi-GPU copies of a patcher share one (comfy/model_base.py,
    `apply_model`).
    """

    def __init__(self, settings: CompileSettings, status: Status | None = None):
        self.settings = settings
        self.status = status
        self._calls = NetworkCalls(settings)
        self.notes = self._calls.notes

    def __call__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        """Parameters have the host's names: a wrapper of another pack may pass each of them by name."""
        args = x, t, c_concat, c_crossattn, control, {} if transformer_options is None else transformer_options
        if (compiler_of_model := self._of_running_patcher(executor.class_obj)) is None:
            return executor(*args, **kwargs)
        if compiler_of_model is not self:
            return compiler_of_model(executor, *args, **kwargs)
        if self._is_left(executor.class_obj, args):
            return executor(*args, **kwargs)
        if self.status is None or _is_copy_for_another_device(executor.class_obj):
            return self._call(executor, *args, **kwargs)
        network = executor.class_obj.diffusion_model
        code, graphs = code_of(network), graphs_of(network)
        options = args[OPTIONS_AT]
        inputs = str(x.shape), shapes_of(args[2:4], kwargs), control is not None, _patches_in(options)
        self.status.begins(network, options.get("sigmas"), inputs)  # the sampler's object: one a step
        code.replays_operators = False
        before, waits = (code.eager_calls, monitor.compilations, graphs.captures + graphs.checks), compiler.awaited
        try:
            result = self._call(executor, *args, **kwargs)
        except BaseException:
            self.status.stopped()
            raise
        eager_calls, *other = code.eager_calls, monitor.compilations, graphs.captures + graphs.checks
        # On a CPU the compiler, or its import, takes cores from the model: compiled steps would look faster than they are.
        beside = eager_calls > before[0] and x.device.type == "cpu"
        beside |= code.waits_for is WaitsFor.IMPORT or is_being_prepared(network)  # slower than without this pack
        one_off = waits or beside or tuple(other) != before[1:]
        self.status.ends(eager_calls > before[0], one_off)
        sizes, shape = watch_of(network).sizes, x.shape
        if eager_calls == before[0] and not code.replays_operators and shape not in sizes:
            sizes[shape] = call_info_of(executor.class_obj, self.settings, args, kwargs).size()
        return result

    def _of_running_patcher(self, base_model) -> "BlockCompiler | None":
        """That patcher's wrapper: the host calls a guider's second model with the first one's options."""
        patcher = getattr(base_model, "current_patcher", None)
        return self if patcher is None else next(iter(patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)), None)

    def _is_left(self, base_model, args: tuple) -> bool:
        """Whether another node compiles the model; says so. PyTorch would compile that node's code anew in each call with our
        forwards, up to its limit."""
        options = args[OPTIONS_AT]
        watch = watch_of(network := unwrapped(base_model.diffusion_model))
        before, watch.left = watch.left, is_left(base_model.diffusion_model, options.get("wrappers", {}))
        if watch.left and not before:
            logger.warning("%s is %s", type(base_model).__name__, in_words(COMPILED_ELSEWHERE, ENGLISH))
        if self.status is not None:
            self.status.is_left = watch.left
        if watch.left and self.status is not None and not _is_copy_for_another_device(base_model):
            self.status.begins(network, None, None)
            self.status.stopped()
        return watch.left

    def _call(self, executor, *args, **kwargs):
        base_model = executor.class_obj
        network = base_model.diffusion_model
        if are_training(network, args[0]):
            text = begin_step(network, args[0])
            self.notes[:] = [other for other in self.notes if other == text or not other.startswith(TRAINING)]
            self.notes.add(text)
            return eager(network, functools.partial(executor, *args, **kwargs))
        with self._calls.prepared() as call:
            payback = payback_of(network)
            watch_of(network).put_off = payback.put_off
            # Other packs' code is looked for when a call is to be captured.
            replays = always_replays(self.settings, network, args[0].device) and watch_of(network).foreign is None
            if self.settings.backend == "cudagraphs":  # that compiles nothing
                payback.after = code_of(network).waits_for = None
            else:
                call.waits = not payback.is_worthwhile(network, args[0], args[OPTIONS_AT], call.synchronous, replays)
            if call.waits:
                code_of(network).waits_for = WaitsFor.PAYBACK
                if not (replays and payback.may_capture(network)):
                    return eager(network, functools.partial(executor, *args, **kwargs))
            measure_attention = None
            if not call.waits:
                args, measure_attention = with_attention(self.settings.attention, base_model, args, call.synchronous)
            run = functools.partial(executor, *args, **kwargs)
            if measure_attention is not None:
                result = eager(network, run)
                measure_attention()
                return result
            loaded = Loaded(base_model, network, base_model.get_dtype_inference(), args[0].device)
            return self._calls.run(loaded, call, args[0].numel(), run, self._told(base_model, args, kwargs, call.synchronous))

    @contextmanager
    def _told(self, base_model, args: tuple, kwargs: dict, synchronous: bool) -> Iterator[None]:
        """Around a call: report the code that the call compiled, and note the call for a warmup."""
        network, settings, compilations = base_model.diffusion_model, self.settings, monitor.compilations
        try:
            yield
        except BaseException:  # code of a stopped run is not reported in the next run
            watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            raise
        if monitor.compilations != compilations or is_warming():
            added = watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            if not synchronous:  # the sampler has not waited
                return
            info = call_info_of(base_model, settings, args, kwargs)
            node = self.status.node if self.status is not None else None
            report_compilation(network, type(base_model).__name__, info, added, settings, node)


def is_left(network: object, wrappers: Mapping[str, Mapping]) -> bool:
    """Whether another node compiles the network or some of its blocks; `wrappers` by kind and key."""
    return is_compiled_elsewhere(network) or COMPILE_KEY in wrappers.get(WrappersMP.APPLY_MODEL, {})


def _is_copy_for_another_device(base_model) -> bool:
    """Whether the first device's model, in the same step, tells the page of it (MultiGPU CFG Split, comfy/multigpu.py)."""
    return getattr(getattr(base_model, "current_patcher", None), "is_multigpu_base_clone", False)


def call_info_of(base_model, settings: CompileSettings, args: tuple, kwargs: dict) -> CallInfo:
    """Describe a call in units of the nodes, by `apply_model(x, t, c_concat, c_crossattn, control, transformer_options)`."""
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
        patches=_patches_in(options),
        layers=_exchanged_layers(base_model.diffusion_model, settings),
    )


def _patches_in(options: dict) -> tuple[str, ...]:
    kinds = ("patches", "patches_replace")
    return tuple(sorted({name for kind in kinds for name, patch in (options.get(kind) or {}).items() if patch}))


def _exchanged_layers(network, settings: CompileSettings) -> tuple[str, ...]:
    """Names of the forwards that other nodes have given to layers inside blocks."""
    states = [state for block in blocks_of(network, settings) if (state := code_of(network).state_of(block)) is not None]
    codes: set[Any] = {codes[0] for state in states for _, codes in state.forwards}
    return tuple(sorted({c.__qualname__ if isinstance(c, type) else getattr(c, "co_qualname", c.co_name) for c in codes}))


APPLY = "apply_model"
# Our functions in the place of the method, with what they replaced on the instance (None: nothing).
_installed: weakref.WeakKeyDictionary[Callable, Any] = weakref.WeakKeyDictionary()


def install_apply(patcher: Any) -> None:
    """Until `uninstall_apply`, bring the patcher's own wrapper to calls of its model that lack it.

    The host's guider of two models calls both with the options of the first (comfy_extras/nodes_custom_sampler.py,
    `Guider_DualModel`). Wrappers of other packs get this method, and ask it for its model (`__self__`).
    """
    uninstall_apply(patcher)
    base_model, ours = patcher.model, patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    original = base_model.__dict__.get(APPLY)

    @functools.wraps(type(base_model).apply_model)
    def apply_model(self: Any, *args: object, **kwargs: Any) -> object:
        by_position = len(args) > OPTIONS_AT
        options: dict = (args[OPTIONS_AT] if by_position else kwargs.get("transformer_options")) or {}  # type: ignore[assignment]
        wrappers = options.get("wrappers", {})
        of_call = {**wrappers.get(WrappersMP.APPLY_MODEL, {}), KEY: ours}
        options = {**options, "wrappers": {**wrappers, WrappersMP.APPLY_MODEL: of_call}}
        if by_position:
            args = (*args[:OPTIONS_AT], options, *args[OPTIONS_AT + 1 :])
        else:
            kwargs["transformer_options"] = options
        return type(self).apply_model(self, *args, **kwargs) if original is None else original(*args, **kwargs)

    _installed[apply_model] = original
    base_model.__dict__[APPLY] = types.MethodType(apply_model, base_model)


def uninstall_apply(patcher: Any) -> None:
    attributes = patcher.model.__dict__
    function = getattr(attributes.get(APPLY), "__func__", None)
    if function is not None and function in _installed:
        del attributes[APPLY]
        if (original := _installed.pop(function)) is not None:
            attributes[APPLY] = original
