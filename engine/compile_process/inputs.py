"""Load and tune the kernels of code before its first run, on inputs of zeros."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..log import logger
from ..tensor_spec import TensorSpec, hint
from ..torch_compat import attention, private
from ..torch_settings import SharedScope
from .operators import is_custom

# Bytes of GPU memory to leave free when allocating the inputs on which kernels are tuned.
MARGIN = 512 * 2**20
# Peak memory of a block as a multiple of its inputs without weights: attention, and an MLP of four times the width.
INTERMEDIATES = 8
# Functions and methods that draw random numbers.
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_"),
}
# How often a kernel is run to tune it. PyTorch's two hundred runs and more, each launched from Python, took a second for a
# block of Flux, and meanwhile steps took 1.6 times as long.
FEW_RUNS = {"memory_warmup_iters": 5, "benchmark_iters": 20}
# Namespaces of operators that may run on zeros.
_OURS = {"torch_compile_kit", "comfy", "comfy_kitchen", "prims"}
_tuning_scope = SharedScope({"benchmark": private.switch("benchmark_gpu", late=True)})


@dataclass(frozen=True)
class Inputs:
    """The inputs that code is called with, as JSON."""

    # For each input a number, or [shape, strides, dtype, device, whether code may write to it: not to weights].
    given: list[Any]

    @classmethod
    def of(cls, graph: fx.GraphModule, fakes: Sequence[Any]) -> Inputs | None:
        """None if only the first real run may load kernels: if the graph draws random numbers (an earlier run would change the
        sampler's), an input is a tensor subclass, an operator is another pack's or returns large weights, or there is no GPU.
        wire.py has accepted all inputs."""
        tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        has_odd_input = any(map(private.is_traceable_wrapper_subclass, tensors))
        if has_odd_input or any(map(_is_random, graph.graph.nodes)) or all(t.device.type != "cuda" for t in tensors):
            return None
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        described = [
            _described(fake, not is_weight(node)) if isinstance(fake, torch.Tensor) else hint(fake)
            for node, fake in zip(nodes, fakes, strict=True)
        ]
        written = sum(_spec_of(one).nbytes for one in described if isinstance(one, list) and one[-1])
        room = (MARGIN + INTERMEDIATES * written) // 2
        return None if any(_is_strange(node, room) for node in graph.graph.nodes) else cls(described)

    @property
    def device(self) -> torch.device:
        devices = [torch.device(one[3]) for one in self.given if isinstance(one, list)]
        return next(device for device in devices if device.type == "cuda")

    def warm_up(self, code: Callable, cached: int) -> None:
        """Load and tune kernels, a good part of the first run. `cached`: bytes of the GPU that PyTorch holds unused."""
        try:
            with torch.inference_mode():
                inputs = self._zeros(cached)
                if inputs is None:
                    return
                with attention.WithoutPlans(), _tuning_scope.wrapping(benchmark=_few_runs):
                    code(*inputs)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # the first real run loads them
            logger.debug("kernels were not loaded in advance: %s", error)

    def _zeros(self, cached: int) -> list | None:
        """Inputs like those of the call; weights, which are only read, share memory. None if memory is too short."""
        inputs = [(_spec_of(one), one[-1]) if isinstance(one, list) else one for one in self.given]
        tensors = [one for one in inputs if isinstance(one, tuple)]
        shared = max((spec.nbytes for spec, is_written in tensors if not is_written), default=0)
        needed = shared + INTERMEDIATES * sum(spec.nbytes for spec, is_written in tensors if is_written)
        free, _total = torch.cuda.mem_get_info(self.device)
        if free + cached < needed + MARGIN:
            return None
        storage = torch.zeros(shared, dtype=torch.uint8, device=self.device).untyped_storage()
        return [(one[0].zeros() if one[1] else one[0].on(storage)) if isinstance(one, tuple) else one for one in inputs]


def _described(fake: torch.Tensor, may_be_written: bool) -> list:
    spec = TensorSpec.of(fake)
    return [list(spec.shape), list(spec.stride), str(spec.dtype).partition(".")[2], str(spec.device), may_be_written]


def _spec_of(described: list) -> TensorSpec:
    shape, stride, dtype, device, _may_be_written = described
    return TensorSpec(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))


def _few_runs(benchmark: Callable) -> Callable:
    """Tune kernels with FEW_RUNS, on this thread; not where PyTorch shares results of tuning with other machines."""
    thread = threading.get_ident()

    @functools.wraps(benchmark)
    def with_few_runs(*args: Any, **options: Any) -> object:
        is_ours = threading.get_ident() == thread and not getattr(private.inductor_config, "autotune_remote_cache", None)
        return benchmark(*args, **({**FEW_RUNS, **options} if is_ours else options))

    return with_few_runs


def _is_random(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name in _RANDOM


def _is_strange(node: fx.Node, room: int) -> bool:
    """Whether `node` calls an operator that may misread zeros, or that returns more than `room` bytes (an unpacked weight)."""
    if not is_custom(node):
        return False
    values = private.pytree.tree_leaves(node.meta.get("example_value"))
    size = sum(TensorSpec.of(value).nbytes for value in values if isinstance(value, torch.Tensor))
    return str(node.target).partition(".")[0] not in _OURS or size > room


def is_weight(node: fx.Node) -> bool:
    """Whether a graph's input is a parameter or buffer of the block, as Dynamo names them."""
    return "_parameters_" in str(node.target) or "_buffers_" in str(node.target)
