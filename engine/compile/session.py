"""The compilations inside one call of a block: settings of PyTorch that hold for them, their folder on disk, what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from torch._dynamo.utils import counters, get_compilation_metrics

from ..cache.disk import DiskCache, current
from ..cache.workers import kernel_scope, waiting_compile
from ..inductor.dynamic_sizes import TRACING, tracing_scope
from ..inductor.kernel_tuning import brief_benchmark, tuning_scope
from ..torch_settings import attention_scope, compile_scope, libdevice, libdevice_scope
from .stats import CompileStats, Recompile

# Read while a graph is made, not when it runs. use_duck_shape ties sizes that happen to be equal (the batch of cfg and RoPE's
# 2x2); the dict-tag shortcut misses a weight whose strides changed through `.data` (pytorch#181873); the captures keep
# mixtures of experts, which pick tokens by mask, in one graph. `sdpa_kernel` puts private functions into the graph, for which
# AOTAutograd's disk cache is left out; all that they depend on is in their arguments, and so in the key.
COMPILE_SWITCHES = {
    "use_duck_shape": False,
    "use_recursive_dict_tags_for_guards": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "force_non_lazy_backward_lowering": True,  # a trainer's: with the forward, under these settings
    "unsafe_marked_cacheable_functions": {f"torch.nn.attention.{n}": "1" for n in ("_sdpa_kernel", "_backend_from_string")},
}
# One of those arguments is the order of kernels to go back to: on some GPUs it depends on what ran before (sdp_utils.cpp), so
# it is PyTorch's default here.
ATTENTION_ORDER = [1, 2, 0, 3, 4]
# What torch.compile(dynamic=...) sets around each call (torch/_dynamo/eval_frame.py, make_set_enable_dynamic), and leaves
# behind where two threads are in compiled code at once. Here it holds only while something is compiled.
STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
DYNAMIC = {"assume_static_by_default": False}


class CompileSession:
    """The compilations inside one call of a block.

    Args:
        block: class name of the block.
        on_first: called before the first compilation, when nothing of the block has run yet; must not raise.
        switches: tells the settings of PyTorch for this block beside `COMPILE_SWITCHES`.
        folder: name of the group's folder in the disk cache, and the class of its blocks.
    """

    __slots__ = (
        "_began",
        "_breaks",
        "_cache",
        "_graphs",
        "_hits",
        "_known",
        "_scopes",
        "_tunes",
        "block",
        "folder",
        "on_first",
        "seconds",
        "started",
        "switches",
    )

    def __init__(
        self,
        block: str,
        on_first: Callable[[], None],
        switches: Callable[[], dict[str, object]],
        folder: tuple[str, str],
    ):
        self.block = block
        self.on_first = on_first
        self.switches = switches
        self.folder = folder
        self._cache: DiskCache | None = None
        self._scopes = ExitStack()
        self._tunes = False
        self._began = 0.0
        self.started = False
        self.seconds = 0.0

    def start(self) -> None:
        if not self.started:
            self.started = True
            self._cache = current()
            if self._cache is not None:
                self._cache.enter(*self.folder)
            self._graphs = counters["stats"]["unique_graphs"]
            self._breaks = dict(counters["graph_break"])
            self._hits = counters["inductor"]["fxgraph_cache_hit"]
            self._known = get_compilation_metrics()  # kept: their numbers start again after torch._dynamo.reset()
            self.on_first()
        self._stop_tuning()
        with ExitStack() as scopes:  # all of them or, after an error, none
            scopes.enter_context(compile_scope.applied(**COMPILE_SWITCHES, **self.switches()))
            scopes.enter_context(attention_scope.applied(attention_order=ATTENTION_ORDER))
            scopes.enter_context(libdevice_scope.applied(**libdevice()))
            scopes.enter_context(tracing_scope.applied(**TRACING))
            scopes.enter_context(kernel_scope.applied(compile=waiting_compile()))
            self._scopes = scopes.pop_all()
        self._began = time.perf_counter()

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        self._scopes.close()
        brief = brief_benchmark()
        if brief is not None:
            tuning_scope.enter(benchmark=brief)
            self._tunes = True

    def _stop_tuning(self) -> None:
        if self._tunes:
            self._tunes = False
            tuning_scope.exit()

    def close(self) -> None:
        """The call has ended. Kernels are tuned when they first run, so the folder is inductor's until now."""
        self._stop_tuning()
        if self._cache is not None:
            self._cache.exit(self.folder[0])
            self._cache = None

    def stats(self) -> CompileStats:
        """What this call compiled, by PyTorch's own counters."""
        breaks = {
            reason: count - self._breaks.get(reason, 0)
            for reason, count in counters["graph_break"].items()
            if count > self._breaks.get(reason, 0)
        }
        known = set(map(id, self._known))
        metrics = [m for m in get_compilation_metrics() if id(m) not in known]
        recompiles = [Recompile(self.block, m.recompile_reason) for m in metrics if m.recompile_reason]
        graphs = counters["stats"]["unique_graphs"] - self._graphs
        hits = counters["inductor"]["fxgraph_cache_hit"] - self._hits
        return CompileStats(graphs, sum(breaks.values()), self.seconds, recompiles, breaks, hits)
