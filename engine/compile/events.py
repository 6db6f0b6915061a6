"""Notice compilations as they happen, and who caused them.

PyTorch calls back on the thread that compiles (torch/_dynamo/callback.py). A call into compiled code puts itself on this
thread's stack; a compilation that starts then belongs to it. In the steady state that costs one list append per call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

from ..cache.disk import current
from ..cache.workers import kernel_scope, waiting_compile
from ..inductor.kernel_tuning import brief_benchmark, tuning_scope
from ..torch_settings import attention_scope, compile_scope
from .dynamic_sizes import TRACING, tracing_scope

logger = logging.getLogger("torch-compile-kit")
# Read while a graph is made, not when it runs. use_duck_shape ties sizes that happen to be equal (the batch of cfg and RoPE's
# 2x2); the dict-tag shortcut misses a weight whose strides changed through `.data` (pytorch#181873); the captures keep
# mixtures of experts, which pick tokens by mask, in one graph. `sdpa_kernel` puts private functions into the graph, for which
# AOTAutograd's disk cache is left out; all that they depend on is in their arguments, and so in the key.
COMPILE_SWITCHES = {
    "use_duck_shape": False,
    "use_recursive_dict_tags_for_guards": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "unsafe_marked_cacheable_functions": {f"torch.nn.attention.{n}": "1" for n in ("_sdpa_kernel", "_backend_from_string")},
}
# One of those arguments is the order of kernels to go back to: on some GPUs it depends on what ran before (sdp_utils.cpp), so
# it is PyTorch's default here.
ATTENTION_ORDER = [1, 2, 0, 3, 4]
# What torch.compile(dynamic=...) sets around each call (torch/_dynamo/eval_frame.py, make_set_enable_dynamic), and leaves
# behind where two threads are in compiled code at once. Here it holds only while something is compiled.
STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
DYNAMIC = {"assume_static_by_default": False}


@dataclass(frozen=True)
class Recompile:
    """One compilation of code that had been compiled before.

    Args:
        block: class name of the block.
        guard: PyTorch's own words, the first guard that failed.
    """

    block: str
    guard: str


@dataclass
class CompileStats:
    """What compiling has cost so far. Subtract an earlier copy to see what a run added.

    Args:
        from_disk: of the graphs, those that inductor's disk cache had.
    """

    graphs: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    recompiles: list[Recompile] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    from_disk: int = 0

    def copy(self) -> CompileStats:
        return CompileStats(
            self.graphs, self.graph_breaks, self.seconds, list(self.recompiles), dict(self.breaks), self.from_disk
        )

    def __add__(self, other: CompileStats) -> CompileStats:
        merged = dict(self.breaks)
        for reason, count in other.breaks.items():
            merged[reason] = merged.get(reason, 0) + count
        return CompileStats(
            self.graphs + other.graphs,
            self.graph_breaks + other.graph_breaks,
            self.seconds + other.seconds,
            self.recompiles + other.recompiles,
            merged,
            self.from_disk + other.from_disk,
        )

    def __sub__(self, earlier: CompileStats) -> CompileStats:
        return CompileStats(
            self.graphs - earlier.graphs,
            self.graph_breaks - earlier.graph_breaks,
            self.seconds - earlier.seconds,
            self.recompiles[len(earlier.recompiles) :],
            {k: v - earlier.breaks.get(k, 0) for k, v in self.breaks.items() if v > earlier.breaks.get(k, 0)},
            self.from_disk - earlier.from_disk,
        )


class CompileEvent:
    """The compilations inside one call of a block.

    Args:
        block: class name of the block.
        on_first: called before the first compilation, when nothing of the block has run yet; must not raise.
        switches: tells the settings of PyTorch for this block beside `COMPILE_SWITCHES`.
        folder: name of the kind's folder in the disk cache, and the class of its blocks.
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
        self._cache = None
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
            scopes.enter_context(compile_scope.holding(**COMPILE_SWITCHES, **self.switches()))
            scopes.enter_context(attention_scope.holding(attention_order=ATTENTION_ORDER))
            scopes.enter_context(tracing_scope.holding(**TRACING))
            scopes.enter_context(kernel_scope.holding(compile=waiting_compile()))
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


class _Monitor(threading.local):
    """The calls in progress on this thread, innermost last, and how often one of them compiled.

    `listener` is called with the block's class name when a compilation begins, and with None when it ends.
    """

    def __init__(self) -> None:
        self.calls: list[CompileEvent] = []
        self.compilations = 0
        self.listener: Callable[[str | None], None] | None = None


monitor = _Monitor()


def _is_compilation(args: object) -> bool:
    """PyTorch also calls back when it measures the variants of a kernel or records a CUDA graph (from 2.8 on)."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "DYNAMO")
    return trigger in ("DYNAMO", "LAZY_BACKWARD")


def _on_compile_start(args: object = None) -> None:
    if monitor.calls and _is_compilation(args):
        monitor.compilations += 1
        with _told("a compilation is not watched"):
            monitor.calls[-1].start()
        if monitor.listener is not None:
            monitor.listener(monitor.calls[-1].block)


def _on_compile_end(args: object = None) -> None:
    if monitor.calls and _is_compilation(args):
        with _told("a compilation was not watched"):
            monitor.calls[-1].end()
        if monitor.listener is not None:
            monitor.listener(None)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """An error of ours inside PyTorch's callback would leave PyTorch counting a compilation for ever, for every pack."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)


class _Watching:
    """Keeps the two callbacks registered while any model samples, and no longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                callback_handler.register_start_callback(_on_compile_start)
                callback_handler.register_end_callback(_on_compile_end)

    def renew(self) -> None:
        """torch._dynamo.reset() forgets the callbacks, whoever calls it."""
        with self._lock:
            if self._users and _on_compile_start not in callback_handler.start_callbacks:
                callback_handler.register_start_callback(_on_compile_start)
                callback_handler.register_end_callback(_on_compile_end)

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for registered, callback in (
                    (callback_handler.start_callbacks, _on_compile_start),
                    (callback_handler.end_callbacks, _on_compile_end),
                ):
                    if callback in registered:  # a reset has forgotten them
                        registered.remove(callback)


watching = _Watching()
