"""Wrap the host's `apply_model`: find which patcher runs a call of a diffusion model, and run the call compiled or eager."""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...blocks.discovery import unwrapped
from ...compile.registry import WaitsFor, code_of
from ...cuda_graphs.capture import graphs_of
from ...log import logger
from ...messages.recompile_log import is_warming, watch_of
from ...messages.status import Status
from ...messages.words import COMPILED_ELSEWHERE, ENGLISH, NOT_CALLED, in_words, told
from ...ownership import is_compiled_elsewhere
from ...settings import CompileSettings
from ...threads import in_one_piece
from ...torch_compat import private
from ..adapter import KEY
from ..graphs.policy import always_replays
from ..graphs.replay import drop_unused
from ..weights.blocks import Loaded
from .attention_choice import OPTIONS_AT, with_attention
from .comparison import comparison_for
from .network_calls import NetworkCalls, are_training, eager
from .observer import is_copy_for_another_device, observed
from .payback import payback_of
from .training import TRAINING, begin_step

# Under this key ComfyUI's node TorchCompileModel and KJNodes wrap `apply_model` (comfy_api/torch_helpers/torch_compile.py):
# inside that wrapper the model, or each of its blocks, is PyTorch's OptimizedModule.
COMPILE_KEY = "torch.compile"


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of the model that `executor` runs.

    A BlockCompiler keeps no model alive, as clones, reloads and multi-GPU copies of a patcher share one BlockCompiler
    (comfy/model_base.py, `apply_model`).

    Attributes:
        is_sampled: the sampler has begun a step of this run.
    """

    def __init__(self, base_model: nn.Module, settings: CompileSettings, status: Status | None = None):
        self._attached_to = weakref.ref(base_model)
        self.settings = settings
        self.status = status
        self._calls = NetworkCalls(settings)
        self.notes = self._calls.notes
        self.is_sampled = self._is_called = False

    def begin_run(self) -> None:
        self.notes.clear()  # a note may be about another pack's code that is gone now
        self.is_sampled = self._is_called = False

    def end_run(self) -> None:
        """The host calls this in a `finally`: also after an error, which may have come before the first call of the model."""
        if self.is_sampled and not self._is_called and sys.exc_info()[0] is None:
            self.notes.add(in_words(NOT_CALLED, ENGLISH))
            if self.status is not None:
                self.status.left = NOT_CALLED
        if self.status is not None:  # the line may say in how many runs compiling begins
            self.status.tell()

    def __call__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        """Parameters have the host's names: a wrapper of another pack may pass each of them by name."""
        args = x, t, c_concat, c_crossattn, control, {} if transformer_options is None else transformer_options
        if (compiler_of_model := self._of_running_patcher(executor.class_obj)) is None:
            return executor(*args, **kwargs)
        if compiler_of_model is not self:
            return compiler_of_model(executor, *args, **kwargs)
        self._is_called = True
        if self._is_left(executor.class_obj, args):
            return executor(*args, **kwargs)
        with observed(self.settings, self.status, executor.class_obj, args, kwargs):
            return in_one_piece(self._call, executor, *args, **kwargs)

    def _of_running_patcher(self, base_model) -> "BlockCompiler | None":
        """The wrapper of the patcher that runs the model: the host calls a guider's second model with the first one's options.

        None for a model that no patcher runs, which other packs call with the options of this model: no node is connected to
        the other model, and nothing would tell when its run is over.
        """
        patcher = getattr(base_model, "current_patcher", None)
        if patcher is None:
            return self if base_model is self._attached_to() else None
        return next(iter(patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)), None)

    def _is_left(self, base_model, args: tuple) -> bool:
        """Whether the model is left as it is, since another node compiles it or has switched off PyTorch's compiler meanwhile;
        logs that. With our forwards inside, PyTorch would recompile the other node's code in each call, up to the limit."""
        watch = watch_of(network := unwrapped(base_model.diffusion_model))
        before, watch.left = watch.left, obstacle(base_model.diffusion_model, args[OPTIONS_AT].get("wrappers", {}))
        if watch.left is not None and not before:
            logger.warning("%s is %s", type(base_model).__name__, in_words(watch.left, ENGLISH))
        if self.status is not None:
            self.status.left = watch.left
        if watch.left is not None and self.status is not None and not is_copy_for_another_device(base_model):
            self.status.begins(network, None, None)
            self.status.stopped()
        return watch.left is not None

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
            watch_of(network).put_off, watch_of(network).lacks = payback.put_off, payback.lacks
            # Obstacles to replays: some are known when a run begins, code of other packs when a call is to be captured.
            is_free = watch_of(network).foreign is None and graphs_of(network).model.obstacle is None
            replays = is_free and always_replays(self.settings, network, args[0].device)
            if self.settings.backend == "cudagraphs":  # this backend compiles nothing
                payback.after = code_of(network).waits_for = None
            else:
                call.waits = not payback.is_worthwhile(network, args[0], args[OPTIONS_AT], call.synchronous, replays)
                call.puts_off = payback.puts_off_traces(network, self.settings, call.synchronous or replays)
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
            compiled = functools.partial(self._calls.run, loaded, call, args[0].numel(), run)
            if call.waits:
                return compiled()
            return self._faster(network, args, kwargs, compiled, functools.partial(eager, network, run))

    def _faster(self, network: nn.Module, args: tuple, kwargs: dict, compiled: Callable, uncompiled: Callable) -> object:
        """Run a call compiled, unless compiled calls were measured to be slower, see comparison.py."""
        watch, device = watch_of(network), args[0].device
        comparison, may_turn = (None, False) if is_warming() else comparison_for(network, self.settings, args, kwargs)
        watch.left_slower = slower = comparison.slower if comparison is not None else None
        if slower is not None:
            self.notes.add(in_words(slower, ENGLISH))
            drop_unused(network, device)
            return uncompiled()
        if comparison is None or not may_turn:
            return compiled()
        return comparison.take_turn(code_of(network), device, compiled, uncompiled)


def obstacle(network: object, wrappers: Mapping = MappingProxyType({})) -> list | None:
    """Why a network is not compiled (see `words.told`); None: it can be compiled.

    Args:
        network: None if there is no network yet.
        wrappers: those of the patcher.
    """
    if (lacking := private.unsupported()) is not None:
        return told("pytorchLacks", torch.__version__, lacking, private.TESTED[0], private.TESTED[-1])
    if (switch := private.switched_off()) is not None:
        return told("leftAsIs", switch)
    if network is None:
        return None
    is_left = is_compiled_elsewhere(network) or COMPILE_KEY in wrappers.get(WrappersMP.APPLY_MODEL, {})
    return COMPILED_ELSEWHERE if is_left else None


APPLY_MODEL = "apply_model"
# Each of our replacements of `apply_model` -> the attribute that it replaced on the instance (None: there was none).
_installed: weakref.WeakKeyDictionary[Callable, Any] = weakref.WeakKeyDictionary()


def install_apply_model(patcher: Any) -> None:
    """Until `uninstall_apply_model`, add the patcher's own wrapper to the options of each call of its model.

    The host's guider of two models calls both with the options of the first (comfy_extras/nodes_custom_sampler.py,
    `Guider_DualModel`). Our replacement is a bound method, as wrappers of other packs get it and read its model (`__self__`).
    """
    uninstall_apply_model(patcher)
    base_model, ours = patcher.model, patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    original = base_model.__dict__.get(APPLY_MODEL)

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
    base_model.__dict__[APPLY_MODEL] = types.MethodType(apply_model, base_model)


def uninstall_apply_model(patcher: Any) -> None:
    attributes = patcher.model.__dict__
    function = getattr(attributes.get(APPLY_MODEL), "__func__", None)
    if function is not None and function in _installed:
        del attributes[APPLY_MODEL]
        if (original := _installed.pop(function)) is not None:
            attributes[APPLY_MODEL] = original
