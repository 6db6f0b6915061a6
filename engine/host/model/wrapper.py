"""The wrapper around the host's `apply_model`: how each call of a model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import comfy.model_management
import torch
from torch import nn

from ...background.model_call import ModelCall, submit
from ...background.thread import compiler
from ...compile.binding import Binding
from ...compile.events import monitor, watching
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...notices.recompile_log import is_warming, report_compilation, watch_of
from ...notices.report import stats_for
from ...notices.status import Status, use_of
from ...settings import CompileSettings
from ...torch_settings import sampling_scope, sampling_switches
from ..adapter import forbids_threads, without_hosts_compiler, without_prefetch
from ..graphs import policy
from ..graphs.policy import Way, note, way_of_call
from ..graphs.replay import graphed
from ..weights import blocks as weights
from ..weights.quantized import traceable_casts
from .attention_choice import with_attention
from .call_info import OPTIONS_AT, call_info_of


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of whatever model runs inside it.

    It keeps no model, so that clones, reloads and multi-GPU copies, which share this object, cannot cross
    (comfy/model_base.py, `apply_model`).
    """

    def __init__(self, settings: CompileSettings, status: Status | None = None):
        self.settings = settings
        self.status = status
        self.notes: list[str] = []

    def __call__(self, executor, *args, **kwargs):
        if self.status is None:
            return self._call(executor, *args, **kwargs)
        network = executor.class_obj.diffusion_model
        code, graphs = code_of(network), graphs_of(network)
        options = args[OPTIONS_AT] if len(args) > OPTIONS_AT else {}
        self.status.begins(network, options.get("sigmas"), args[0].shape)  # the sampler's object: one a step
        before, waits = (code.eager_calls, monitor.compilations, graphs.captures), compiler.awaited
        result = self._call(executor, *args, **kwargs)
        eager_calls, *other = code.eager_calls, monitor.compilations, graphs.captures
        self.status.ends(eager_calls > before[0], waits or tuple(other) != before[1:])
        sizes, shape = use_of(network).sizes, args[0].shape
        if eager_calls == before[0] and shape not in sizes:
            sizes[shape] = call_info_of(executor.class_obj, self.settings, args, kwargs).size()
        return result

    def _call(self, executor, *args, **kwargs):
        base_model, device = executor.class_obj, args[0].device
        network = base_model.diffusion_model
        if _wants_gradients(args[0], network):
            note(self.notes, "Training: blocks run uncompiled while gradients are wanted.")
            return _eager(network, functools.partial(executor, *args, **kwargs))
        if compiler.awaited:
            compiler.wait(poll=raise_if_interrupted)
        with self._settings_of_a_call():
            call = ModelCall(self.settings.waits or is_warming() or self._must_wait(), raise_if_interrupted)
            args, measure_attention = with_attention(self.settings.attention, executor, tuple(args), kwargs, call.waits)
            run = functools.partial(executor, *args, **kwargs)
            if measure_attention is not None:
                return _eager(network, run, measure_attention)
            with traceable_casts(network):
                way = way_of_call(self.settings, network, device, call.waits, self.notes)
                if way is Way.MEASURED:
                    return _eager(network, functools.partial(policy.measure, network, run))
                weights_of = functools.partial(weights.weights_of, base_model, self.settings.block_swap, device)
                binding = Binding(network, self.settings, call, weights_of)
                with self._bound(way, network, binding, device), self._told(base_model, args, kwargs):
                    result = run()
                    _after_call(network, call, way)
                return result

    @contextmanager
    def _settings_of_a_call(self) -> Iterator[None]:
        """What holds for PyTorch and the host while the model runs, also eager."""
        switches = sampling_switches(self.settings.allow_tf32, self.settings.cudnn_benchmark)
        with watching, without_hosts_compiler(), sampling_scope.applied(**switches) if switches else nullcontext():
            yield

    @contextmanager
    def _bound(self, way: Way, network: nn.Module, binding: Binding, device: torch.device) -> Iterator[None]:
        """While it lasts, the model runs that way."""
        if way is Way.REPLAYED:
            with graphed(network, binding, device, self.notes):
                yield
            return
        with without_prefetch(network) if binding.paged else nullcontext(), binding.bound():
            yield

    @contextmanager
    def _told(self, base_model, args: tuple, kwargs: dict) -> Iterator[None]:
        """What is compiled meanwhile is told, and noted for the warmup that runs."""
        network, settings, compilations = base_model.diffusion_model, self.settings, monitor.compilations
        try:
            yield
        except BaseException:  # what a run compiled that was stopped is not news in the next one
            watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            raise
        if monitor.compilations != compilations or is_warming():
            added = watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            info = call_info_of(base_model, settings, args, kwargs)
            report_compilation(network, type(base_model).__name__, info, added, settings)

    def _must_wait(self) -> bool:
        if not forbids_threads():
            return False
        note(self.notes, "Compiled at once: with --verbose DEBUG ComfyUI's memory manager bears no thread in the background.")
        return True


def _wants_gradients(x: torch.Tensor, network: nn.Module) -> bool:
    """Whether it is a trainer's call (comfy_extras/nodes_train.py): what is set for sampling keeps nothing for a backward."""
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in network.parameters()))


def _eager(network: nn.Module, run: Callable[[], object], afterwards: Callable[[], None] = lambda: None) -> object:
    """A call in which nothing is compiled."""
    result = run()
    afterwards()
    code_of(network).eager_calls += 1
    return result


def _after_call(network: nn.Module, call: ModelCall, way: Way) -> None:
    """What the call lacked is made, once nobody is kept from Python by it."""
    code = code_of(network)
    code.eager_calls += bool(call.eager)
    if call.ran or code.uncalled:
        code.settled = not call.eager and not code.is_being_compiled
    if way is not Way.COMPILED:
        submit(call.requests)  # else the next call asks again, and is captured


def raise_if_interrupted() -> None:
    """Stop here when the user has pressed cancel."""
    # The host polls before every layer, but not inside compiled code (comfy/ops.py, run_every_op).
    comfy.model_management.throw_exception_if_processing_interrupted()
