"""CUDA graphs over a whole diffusion model, one per shape.

PyTorch's own (`triton.cudagraphs`) make a tree per compiled region, and regions that follow each other overwrite their outputs
(pytorch#152887). Here the model's forward, compiled blocks and all, is captured once per shape and replayed: no Python, no
launches one by one. Small models are bound by those; large ones gain little.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .failures import never_swallowed
from .per_model import PerModel

logger = logging.getLogger("torch-compile-kit")
# Each graph holds its inputs and its output; working memory is shared.
MAX_GRAPHS = 8
# Tensors up to this size are copied to where the graphs know them when the host has put them elsewhere.
SMALL = 2**20


@dataclass
class Captured:
    """One captured call.

    Args:
        inputs: the tensors to fill before a replay, in the order of the flattened arguments.
        output: what the call returns, overwritten by each replay.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: object

    def replay(self, tensors: list[torch.Tensor]) -> object:
        for static, given in zip(self.inputs, tensors, strict=True):
            static.copy_(given)
        self.graph.replay()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self.output)


@dataclass
class ModelGraphs:
    """The graphs of one model.

    Args:
        seen: calls that have run plainly once, and so have compiled what they need.
        failures: why a call cannot be captured.
        obstacle: what about the layers forbids replays now, or None.
        state: where the weights were, and what the layers ran, when the graphs were captured.
        homes: where the small tensors were.
        absences: calls of this run, one after the other, for which not all paged weights were in memory.
        crowded: they do not all fit.
    """

    graphs: dict[Hashable, Captured] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)
    failures: dict[Hashable, str] = field(default_factory=dict)
    state: list | None = None
    homes: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    checked: bool = False
    obstacle: str | None = None
    absences: int = 0
    crowded: bool = False
    captures: int = 0
    replays: int = 0
    _pool: object = None

    def drop(self) -> None:
        """Free the graphs and their memory: the weights have moved, or are about to."""
        self.graphs.clear()
        self.seen.clear()
        self.failures.clear()
        self.homes.clear()
        self.state = None
        self._pool = None

    def new_run(self) -> None:
        """A sampling run begins: weights may have moved since the last."""
        self.checked = False
        self.obstacle = None
        self.absences = 0

    def check_model(self, model: nn.Module, places: Callable[[nn.Module], object] = lambda _layer: None) -> None:
        """Once a sampling run: graphs hold the addresses of the weights, and what replaced forwards and hooks did.

        Args:
            places: where the host keeps the weights of a layer that are not its parameters now.
        """
        if self.checked:
            return
        self.checked = True
        state: list[object] = []
        homes = {}
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.device.type not in ("cpu", "meta"):
                        tensor = self._settle(table, name, tensor, self.homes.get((path, name)))
                        state.append(tensor.data_ptr())
                        if tensor.nbytes <= SMALL:
                            homes[path, name] = tensor.data
            forward = module.__dict__.get("forward")
            state.append(None if isinstance(forward, functools.partial) else forward)  # partials are our own, see binding
            state += [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), places(module)]
            if module._forward_hooks or module._forward_pre_hooks:
                self.obstacle = "a layer has a forward hook"
        if self.state != state:
            if self.graphs:
                logger.info("the model's weights or layers have changed: CUDA graphs are captured anew")
            self.drop()
            self.state, self.homes = state, homes

    @staticmethod
    def _settle(table: dict, name: str, tensor: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
        """The tensor at the address that the graphs know; the host makes small ones anew for each run (dynamic VRAM)."""
        if home is None or home.data_ptr() == tensor.data_ptr():
            return tensor
        if (home.shape, home.dtype, home.device, home.stride()) != (tensor.shape, tensor.dtype, tensor.device, tensor.stride()):
            return tensor
        with torch.inference_mode():
            home.copy_(tensor)
        table[name] = nn.Parameter(home, requires_grad=False) if isinstance(tensor, nn.Parameter) else home
        return table[name]

    def call(self, key: Hashable, forward: Callable, args: tuple, kwargs: dict, fixed: dict, present: bool = True) -> object:
        """Replay the call if it has been captured, capture it when it comes the second time, else run it.

        Args:
            key: everything but tensors that the call depends on.
            args, kwargs: tensors and what they are nested in; every tensor becomes an input of the graph.
            fixed: keyword arguments that are the same for equal keys.
            present: all weights are where the graphs know them.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        key = (key, others, repr(spec), *((t.shape, t.dtype, t.device, t.stride()) for t in tensors))
        captured = self.graphs.get(key)
        if captured is not None and present:
            self.replays += 1
            return captured.replay(tensors)
        if key not in self.seen or key in self.failures or not present:
            result = forward(*args, **kwargs, **fixed)
            self.seen.add(key)
            return result
        return self._capture(key, forward, leaves, spec, tensors, fixed)

    def _capture(self, key: Hashable, forward: Callable, leaves: list, spec: object, tensors: list, fixed: dict) -> object:
        static = [t.clone(memory_format=torch.preserve_format) for t in tensors]
        replacements = iter(static)
        own = [next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, spec)
        while len(self.graphs) >= MAX_GRAPHS:
            self.graphs.pop(next(iter(self.graphs)))
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                output = forward(*args, **kwargs, **fixed)
        except Exception as error:
            if never_swallowed(error):
                raise
            torch.cuda.synchronize()
            self.failures[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            logger.warning("CUDA graph not captured, running without: %s", self.failures[key])
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return forward(*args, **kwargs, **fixed)
        self.captures += 1
        logger.info("CUDA graph %d captured", self.captures)
        self.graphs[key] = captured = Captured(graph, static, output)
        # In-place work on the inputs while capturing did not run; the replay starts from the caller's values.
        return captured.replay(tensors)


# The graphs that belong to a model.
graphs_of = PerModel(lambda _model: ModelGraphs())
