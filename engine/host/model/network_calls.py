"""How each call of a network that the host has loaded runs: compiled, replayed from a CUDA graph, or uncompiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import comfy.model_management
import torch
from torch import nn

from ...background.model_call import ModelCall
from ...background.thread import compiler
from ...compile.binding import Binding
from ...compile.events import watching
from ...compile.registry import code_of
from ...notices.recompile_log import is_warming
from ...settings import CompileSettings
from ...torch_settings import sampling_scope, sampling_switches
from ..adapter import forbids_threads, without_hosts_compiler, without_prefetch
from ..graphs import policy
from ..graphs.policy import Way, note, way_of_call
from ..graphs.replay import graphed
from ..weights.blocks import Loaded, weights_of
from ..weights.traceable_layers import traceable_casts


class NetworkCalls:
    """The calls under the settings of one node.

    Args:
        settings: of that node.
    """

    def __init__(self, settings: CompileSettings):
        self.settings = settings
        self.notes: list[str] = []

    def are_training(self, network: nn.Module, x: torch.Tensor) -> bool:
        """Whether it is a trainer's call (comfy_extras/nodes_train.py): settings of sampling keep nothing for a backward."""
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in network.parameters()))

    @contextmanager
    def prepared(self) -> Iterator[ModelCall]:
        """A call, and while it lasts what holds for PyTorch and the host, also where it runs uncompiled."""
        if compiler.awaited:
            compiler.wait(poll=raise_if_interrupted)
        switches = sampling_switches(self.settings.allow_tf32, self.settings.cudnn_benchmark)
        with watching, without_hosts_compiler(), sampling_scope.applied(**switches) if switches else nullcontext():
            yield ModelCall(self.settings.waits or is_warming() or self._must_wait(), raise_if_interrupted)

    def run(
        self, loaded: Loaded, call: ModelCall, run: Callable[[], object], told: AbstractContextManager | None = None
    ) -> object:
        """Make the call.

        Args:
            run: the call itself.
            told: entered while it runs; not while it is only measured.
        """
        network = loaded.network
        with traceable_casts(network):
            way = way_of_call(self.settings, network, loaded.device, call.synchronous, self.notes)
            if way is Way.MEASURED:
                return eager(network, functools.partial(policy.measure, network, run))
            binding = Binding(network, self.settings, call, functools.partial(weights_of, loaded, self.settings.block_swap))
            with self._bound(way, loaded, binding), told or nullcontext():
                result = run()
                code_of(network).eager_calls += call.uncompiled
            return result

    @contextmanager
    def _bound(self, way: Way, loaded: Loaded, binding: Binding) -> Iterator[None]:
        """While it lasts, the network runs that way."""
        network = loaded.network
        if way is Way.REPLAYED:
            with graphed(network, binding, loaded.device, self.notes):
                yield
            return
        with without_prefetch(network) if binding.paged else nullcontext(), binding.bound():
            yield

    def _must_wait(self) -> bool:
        if not forbids_threads():
            return False
        note(self.notes, "Compiled at once: with --verbose DEBUG ComfyUI's memory manager bears no thread in the background.")
        return True


def eager(network: nn.Module, run: Callable[[], object], afterwards: Callable[[], None] = lambda: None) -> object:
    """A call in which nothing is compiled."""
    result = run()
    afterwards()
    code_of(network).eager_calls += 1
    return result


def raise_if_interrupted() -> None:
    """Stop here when the user has pressed cancel."""
    # The host polls before every layer, but not inside compiled code (comfy/ops.py, run_every_op).
    comfy.model_management.throw_exception_if_processing_interrupted()
