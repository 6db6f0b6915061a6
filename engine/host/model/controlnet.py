"""Attach compile settings to a ControlNet of the host."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.controlnet
import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...background.gate import gate
from ...compile.binding import plan_for
from ...compile.registry import code_of, not_looked_at_in_words
from ...errors import InvalidSetting
from ...notices.status import Line, Status
from ...notices.words import told
from ...settings import CompileSettings
from ...torch_compat import private
from ..graphs.replay import graphs_summary, new_run
from ..weights import blocks as weights
from ..weights.partial_load import release_buffers
from .attach import KEY, prepare_compiling
from .network_calls import NetworkCalls, eager

logger = logging.getLogger(KEY)
# Networks whose sampling run has begun; until the host cleans up after it.
_running: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CompiledControl:
    """In place of a ControlNet's network, which stays as it is; all but calls is the network's own.

    The host's copies of a ControlNet take it along (comfy/controlnet.py, `copy`), its deep copies for other GPUs do not.

    Args:
        network: of the ControlNet.
        status: of the node in the page.
    """

    def __init__(self, network: nn.Module, settings: CompileSettings, status: Status | None):
        self.network = network
        self._status = status
        self._calls = NetworkCalls(settings)

    def __getattr__(self, name: str) -> Any:
        network = self.__dict__.get("network")
        if network is None:
            raise AttributeError(name)
        return getattr(network, name)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.network, memo)

    def __call__(self, x, **inputs: Any) -> object:
        network = self.network
        run = functools.partial(network, x, **inputs)
        if self._calls.are_training(network, x):
            return eager(network, run)
        if network not in _running:
            _running.add(network)
            gate.close()
            code_of(network).new_run()
            new_run(network)
            if self._status is not None:
                self._status.new_run()
        loaded = weights.Loaded(network, network, x.dtype, x.device)
        with self._told(x), self._calls.prepared() as call:
            result = self._calls.run(loaded, call, run)
        gate.close()  # a replay has opened it, and the model's own call comes next
        return result

    @contextmanager
    def _told(self, x: torch.Tensor) -> Iterator[None]:
        """Around a call: the line of the node. Its steps are not timed: they are parts of the model's."""
        status = self._status
        if status is None:
            yield
            return
        status.begins(self.network, None, x.shape)
        try:
            yield
        finally:
            status.stopped()

    def notes(self) -> list[str]:
        """For the report of a warmup that ran it."""
        code, kind = code_of(self.network), type(self.network).__name__
        groups = list(code.groups.values())
        graphs, breaks = (sum(getattr(g.stats, name) for g in groups) for name in ("graphs", "graph_breaks"))
        lines = [
            f"{graphs} graphs, {breaks} graph breaks",
            *graphs_summary(self.network),
            *self._calls.notes,
            *(not_looked_at_in_words(name, reason) for name, reason in code.not_looked_at.items()),
        ]
        return [f"ControlNet ({kind}): {line}" for line in [*lines, *(g.failure.message() for g in groups if g.failure)]]


def attach_control(control: Any, settings: CompileSettings, node: str | None = None) -> Any:
    """The ControlNet with its blocks compiled; the one given stays as it is, its weights are shared.

    Args:
        control: of the host (comfy.controlnet.ControlBase).
        node: whose line in the page tells how it goes.

    Raises:
        InvalidSetting: it is no ControlNet of the host.
    """
    if not isinstance(control, comfy.controlnet.ControlBase):
        raise InvalidSetting("control_net", control, "connect a ControlNet, such as that of Load ControlNet Model.")
    network = getattr(control, "control_model", None)
    if isinstance(network, CompiledControl):  # of a node before
        network = network.network
    found = control.copy()
    lacking = private.unsupported()
    if settings.enabled and lacking is not None:
        found.torch_compile_kit_line = line = Line(node)
        line.put("control", told("pytorchLacks", torch.__version__, lacking, *private.TESTED))
        return found
    if not settings.enabled or not isinstance(network, nn.Module) or not hasattr(control, "control_model_wrapped"):
        if settings.enabled:
            found.torch_compile_kit_line = line = Line(node)
            line.put("control", told("controlLeft", type(control).__name__))
            logger.info(
                "%s: its network runs once an image, or is made anew for each; it is left uncompiled", type(control).__name__
            )
        return found
    prepare_compiling(settings)
    found.control_model = CompiledControl(network, settings, Status(node) if node is not None else None)
    found.control_model_wrapped = patcher = control.control_model_wrapped.clone()
    events = {
        CallbacksMP.ON_CLEANUP: _run_is_over,
        CallbacksMP.ON_LOAD: _loaded,
    }
    for event, action in events.items():
        patcher.remove_callbacks_with_key(event, KEY)
        patcher.add_callback_with_key(event, KEY, action)
    logger.info("%s: %s; %s", type(network).__name__, settings.describe(), plan_for(network).summary())
    return found


def controls_in(conditioning: list) -> list[CompiledControl]:
    """Those that a sampler's conditioning brings along, each once."""
    found: dict[int, CompiledControl] = {}
    for _tensor, options in conditioning:
        control = options.get("control")
        while control is not None:
            network = getattr(control, "control_model", None)
            if isinstance(network, CompiledControl):
                found[id(network.network)] = network
            control = getattr(control, "previous_controlnet", None)
    return list(found.values())


def _run_is_over(patcher: Any) -> None:
    gate.close()
    _running.discard(patcher.model)
    release_buffers()
    weights.forget_weights(patcher.model)


def _loaded(patcher: Any, *_: object) -> None:
    """Weights may have moved. The host cleans up after no run that was cancelled (comfy/samplers.py, `outer_sample`), and loads
    anew in the middle of one where a VAE needs room."""
    _running.discard(patcher.model)
