"""The wrapper around the host's `apply_model`: how each call of a diffusion model runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from ...background.thread import compiler
from ...compile.events import monitor
from ...compile.registry import code_of
from ...cuda_graphs.capture import graphs_of
from ...notices.recompile_log import is_warming, report_compilation, watch_of
from ...notices.report import stats_for
from ...notices.status import Status, use_of
from ...settings import CompileSettings
from ..graphs.policy import note
from ..weights.blocks import Loaded
from .attention_choice import with_attention
from .call_info import OPTIONS_AT, call_info_of
from .network_calls import NetworkCalls, eager
from .training import TRAINING, begin_step


class BlockCompiler:
    """The APPLY_MODEL wrapper: compiles the blocks of whatever model runs inside it.

    It keeps no model, so that clones, reloads and multi-GPU copies, which share this object, cannot cross
    (comfy/model_base.py, `apply_model`).
    """

    def __init__(self, settings: CompileSettings, status: Status | None = None):
        self.settings = settings
        self.status = status
        self._calls = NetworkCalls(settings)
        self.notes = self._calls.notes

    def __call__(self, executor, *args, **kwargs):
        if self.status is None:
            return self._call(executor, *args, **kwargs)
        network = executor.class_obj.diffusion_model
        code, graphs = code_of(network), graphs_of(network)
        options = args[OPTIONS_AT] if len(args) > OPTIONS_AT else {}
        self.status.begins(network, options.get("sigmas"), args[0].shape)  # the sampler's object: one a step
        before, waits = (code.eager_calls, monitor.compilations, graphs.captures), compiler.awaited
        try:
            result = self._call(executor, *args, **kwargs)
        except BaseException:
            self.status.stopped()
            raise
        eager_calls, *other = code.eager_calls, monitor.compilations, graphs.captures
        self.status.ends(eager_calls > before[0], waits or tuple(other) != before[1:])
        sizes, shape = use_of(network).sizes, args[0].shape
        if eager_calls == before[0] and shape not in sizes:
            sizes[shape] = call_info_of(executor.class_obj, self.settings, args, kwargs).size()
        return result

    def _call(self, executor, *args, **kwargs):
        base_model = executor.class_obj
        network = base_model.diffusion_model
        if self._calls.are_training(network, args[0]):
            said = begin_step(network, args[0])
            self.notes[:] = [known for known in self.notes if known == said or not known.startswith(TRAINING)]
            note(self.notes, said)
            return eager(network, functools.partial(executor, *args, **kwargs))
        with self._calls.prepared() as call:
            args, measure_attention = with_attention(self.settings.attention, executor, tuple(args), kwargs, call.synchronous)
            run = functools.partial(executor, *args, **kwargs)
            if measure_attention is not None:
                return eager(network, run, measure_attention)
            where = Loaded(base_model, network, base_model.get_dtype_inference(), args[0].device)
            return self._calls.run(where, call, run, self._told(base_model, args, kwargs, call.synchronous))

    @contextmanager
    def _told(self, base_model, args: tuple, kwargs: dict, synchronous: bool) -> Iterator[None]:
        """What is compiled meanwhile is told, and noted for the warmup that runs."""
        network, settings, compilations = base_model.diffusion_model, self.settings, monitor.compilations
        try:
            yield
        except BaseException:  # what a run compiled that was stopped is not news in the next one
            watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            raise
        if monitor.compilations != compilations or is_warming():
            added = watch_of(network).added(settings.settings_key(), stats_for(network, settings))
            if not synchronous:  # nobody has waited
                return
            info = call_info_of(base_model, settings, args, kwargs)
            report_compilation(network, type(base_model).__name__, info, added, settings)
