"""Attach compile settings to a ControlNet of the host."""

import copy
import functools
import weakref
from contextlib import ExitStack
from typing import Any

import comfy.controlnet
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...compile.binding import plan_for
from ...compile.registry import code_of
from ...errors import InvalidSetting
from ...log import logger
from ...messages.report import total_of
from ...messages.status import Line, Status
from ...messages.words import ENGLISH, in_words, told
from ...settings import CompileSettings
from ..adapter import KEY, set_callbacks
from ..graphs.replay import graphs_summary
from ..weights.blocks import Loaded
from ..weights.placement import overridden, override_methods
from .attach import prepare_compiling
from .network_calls import NetworkCalls, are_training, begin_run, eager, end_run
from .wrapper import obstacle

# Networks whose sampling run has begun, until the host cleans up after the run.
_running: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CompiledControl:
    """Run the calls of a ControlNet's network under the settings of one node."""

    def __init__(self, network: nn.Module, settings: CompileSettings, status: Status | None):
        self.network = network
        self._status = status
        self._calls = NetworkCalls(settings)

    def __call__(self, x, *more: Any, **inputs: Any) -> object:
        network = self.network
        run = functools.partial(network, x, *more, **inputs)
        if are_training(network, x):
            return eager(network, run)
        if network not in _running:
            _running.add(network)
            self._calls.notes.clear()  # a note may be about another pack's code that is gone now
            begin_run(network, self._status)
        with ExitStack() as scopes:
            left = obstacle(network)
            if self._status is not None:
                self._status.left = left
                self._status.begins(network, None, x.shape)  # no step is timed: these calls are parts of the model's steps
                scopes.callback(self._status.stopped)
            if left is not None:
                return eager(network, run)
            call = scopes.enter_context(self._calls.prepared())
            result = self._calls.run(Loaded(network, network, x.dtype, x.device), call, x.numel(), run)
        return result

    def notes(self) -> list[str]:
        """For the report of a warmup that ran the ControlNet."""
        code, groups = code_of(self.network), code_of(self.network).groups.values()
        total = total_of(groups)
        lines = [f"{total.graphs} graphs, {total.graph_breaks} graph breaks", *graphs_summary(self.network)]
        lines += [*self._calls.notes, *code.eager_in_words(), *(g.failure.message() for g in groups if g.failure)]
        return [f"ControlNet ({type(self.network).__name__}): {line}" for line in lines]


class StandIn:
    """Take the place of a ControlNet's network; only calls differ.

    Other packs check the class of the network and its name, and set attributes or a forward. So a StandIn has the network's
    `__dict__`, and a class that inherits from the network's, see `stand_in_for`. The host's copies of a ControlNet keep the
    StandIn (comfy/controlnet.py, `copy`). A copy of the StandIn itself, as in the host's deep copies for other GPUs, is a copy
    of the network.
    """

    __slots__ = ("torch_compile_kit",)
    torch_compile_kit: CompiledControl

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        return self.torch_compile_kit(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.torch_compile_kit.network, memo)  # `memo`: one copy for all that hold the network

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            self.torch_compile_kit.network.__class__ = value
            value = overridden(value, StandIn)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.torch_compile_kit.network.__reduce_ex__(protocol)


# With these attributes `torch.compile` of a StandIn compiles the network (torch/_dynamo/eval_frame.py, `innermost_fn`).
_OF_COMPILE = {
    "_torchdynamo_orig_callable": property(lambda self: self.torch_compile_kit.network),
    "_torchdynamo_wrapper_id": property(id),
}
for _name, _value in _OF_COMPILE.items():
    setattr(StandIn, _name, _value)


def stand_in_for(network: nn.Module, control: CompiledControl) -> Any:
    kind: Any = type(network)
    stand_in: Any = object.__new__(overridden(kind, StandIn))
    object.__setattr__(stand_in, "__dict__", vars(network))
    object.__setattr__(stand_in, "torch_compile_kit", control)
    return stand_in


def attach_control(control: Any, settings: CompileSettings, node: str | None = None) -> Any:
    """A copy of `control` (comfy.controlnet.ControlBase) whose blocks run compiled; weights are shared.

    The page shows the progress in the node whose id is `node`.

    Raises:
        InvalidSetting: `control` is no ControlNet of the host.
    """
    if not isinstance(control, comfy.controlnet.ControlBase):
        raise InvalidSetting("control_net", control, "connect a ControlNet, such as that of Load ControlNet Model.")
    network = getattr(control, "control_model", None)
    if isinstance(network, StandIn):  # of an earlier node
        network = network.torch_compile_kit.network
    compiled = control.copy()
    kind, why = type(control).__name__, obstacle(network)
    if why is not None or not isinstance(network, nn.Module) or not hasattr(control, "control_model_wrapped"):
        why = why or told("controlLeft", kind)  # the network runs once per image, or is created anew for each image
        Line(node).put("control", why)
        logger.info("%s is %s", kind, in_words(why, ENGLISH))
        return compiled
    prepare_compiling(settings)
    status = Status(node, settings) if node is not None else None
    compiled.control_model = stand_in_for(network, CompiledControl(network, settings, status))
    compiled.control_model_wrapped = patcher = control.control_model_wrapped.clone()
    set_callbacks(patcher, KEY, {CallbacksMP.ON_CLEANUP: _end_run})
    override_methods(patcher, EndRunAtLoad)
    logger.info("%s: %s; %s", type(network).__name__, settings.describe(), plan_for(network).summary())
    return compiled


def controls_in(conditioning: list) -> list[CompiledControl]:
    """The compiled ControlNets in a sampler's conditioning, each network once."""
    controls: dict[int, CompiledControl] = {}
    for _tensor, options in conditioning:
        control = options.get("control")
        while control is not None:
            network = getattr(control, "control_model", None)
            if isinstance(network, StandIn):
                controls[id(network.torch_compile_kit.network)] = network.torch_compile_kit
            control = getattr(control, "previous_controlnet", None)
    return list(controls.values())


def _end_run(patcher: Any) -> None:
    _running.discard(patcher.model)
    end_run(patcher.model)


class EndRunAtLoad:
    """Override `partially_load` of a ControlNet's patcher, which the host calls before each run, to end the previous run.

    The host calls no ON_CLEANUP after a cancelled run (comfy/samplers.py, `outer_sample`), and no ON_LOAD for a ControlNet that
    is loaded whole. The host also calls `partially_load` in the middle of a run when a VAE needs memory: weights may move then,
    so the next call begins another run.
    """

    model: nn.Module

    def partially_load(self, *args, **kwargs) -> int:
        if self.model in _running:
            _end_run(self)
        return super().partially_load(*args, **kwargs)  # type: ignore[misc]
