"""Notice compilations as they happen, and who caused them.

PyTorch calls back on the thread that compiles (torch/_dynamo/callback.py). A call into compiled code puts itself on this
thread's stack; a compilation that starts then belongs to it. In the steady state that costs one list append per call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters, get_compilation_metrics

from .scopes import compile_scope

# Read while a graph is made, not when it runs. use_duck_shape ties sizes that happen to be equal (the batch of cfg and RoPE's
# 2x2); the dict-tag shortcut misses a weight whose strides changed through `.data` (pytorch#181873); the captures keep
# mixtures of experts, which pick tokens by mask, in one graph.
COMPILE_SWITCHES = {
    "use_duck_shape": False,
    "use_recursive_dict_tags_for_guards": False,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
}


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
    """What compiling has cost so far. Subtract an earlier copy to see what a run added."""

    graphs: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    recompiles: list[Recompile] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)

    def copy(self) -> CompileStats:
        return CompileStats(self.graphs, self.graph_breaks, self.seconds, list(self.recompiles), dict(self.breaks))

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
        )

    def __sub__(self, earlier: CompileStats) -> CompileStats:
        return CompileStats(
            self.graphs - earlier.graphs,
            self.graph_breaks - earlier.graph_breaks,
            self.seconds - earlier.seconds,
            self.recompiles[len(earlier.recompiles) :],
            {k: v - earlier.breaks.get(k, 0) for k, v in self.breaks.items() if v > earlier.breaks.get(k, 0)},
        )


class CompileEvent:
    """The compilations inside one call of a block.

    Args:
        block: class name of the block.
        on_first: called before the first compilation, when nothing of the block has run yet.
        switches: settings of PyTorch for this block beside `COMPILE_SWITCHES`.
    """

    __slots__ = ("_began", "_breaks", "_compiles", "_graphs", "block", "on_first", "seconds", "started", "switches")

    def __init__(self, block: str, on_first: Callable[[], None], switches: dict[str, object]):
        self.block = block
        self.on_first = on_first
        self.switches = switches
        self.started = False
        self.seconds = 0.0

    def start(self) -> None:
        if not self.started:
            self.started = True
            self._graphs = counters["stats"]["unique_graphs"]
            self._breaks = dict(counters["graph_break"])
            self._compiles = {m.compile_id for m in get_compilation_metrics()}
            self.on_first()
        compile_scope.enter(**COMPILE_SWITCHES, **self.switches)
        self._began = time.perf_counter()

    def end(self) -> None:
        self.seconds += time.perf_counter() - self._began
        compile_scope.exit()

    def stats(self) -> CompileStats:
        """What this call compiled, by PyTorch's own counters."""
        breaks = {
            reason: count - self._breaks.get(reason, 0)
            for reason, count in counters["graph_break"].items()
            if count > self._breaks.get(reason, 0)
        }
        metrics = [m for m in get_compilation_metrics() if m.compile_id not in self._compiles]
        recompiles = [Recompile(self.block, m.recompile_reason) for m in metrics if m.recompile_reason]
        graphs = counters["stats"]["unique_graphs"] - self._graphs
        return CompileStats(graphs, sum(breaks.values()), self.seconds, recompiles, breaks)


class _Monitor(threading.local):
    """The calls in progress on this thread, innermost last, and how often one of them compiled.

    `listener` is called with the block's class name when a compilation begins, and with None when it ends.
    """

    def __init__(self) -> None:
        self.calls: list[CompileEvent] = []
        self.compilations = 0
        self.listener: Callable[[str | None], None] | None = None


monitor = _Monitor()


def _on_compile_start(_args: object) -> None:
    if monitor.calls:
        monitor.compilations += 1
        monitor.calls[-1].start()
        if monitor.listener is not None:
            monitor.listener(monitor.calls[-1].block)


def _on_compile_end(_args: object) -> None:
    if monitor.calls:
        monitor.calls[-1].end()
        if monitor.listener is not None:
            monitor.listener(None)


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

    def __exit__(self, *_exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                callback_handler.remove_start_callback(_on_compile_start)
                callback_handler.remove_end_callback(_on_compile_end)


watching = _Watching()
