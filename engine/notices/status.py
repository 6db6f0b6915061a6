"""One line for a node in the page: what is made for its model, and what the steps that ran have taken since."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import nn

from ..compile.compiled_code import on_trace
from ..compile.registry import code_of
from ..per_model import PerModel
from .words import say

# Steps that are looked back at, and the fewest that say anything.
KEPT, FEWEST = 40, 3
# Shares that measurements of the same thing differ by.
SAME = 0.02
# Who wants to know: the page. Node, state (compiling, ready, failed), line.
listeners: list[Callable[[str, str, str], None]] = []


@dataclass
class Use:
    """What a model's code has been used for.

    Args:
        sizes: in words, of calls that ran compiled, by the shape of their input.
        gained: seconds, of steps at sizes of which uncompiled ones have run as well; None: none have.
    """

    sizes: dict[Hashable, str] = field(default_factory=dict)
    gained: float | None = None


use_of = PerModel(lambda _model: Use())


@dataclass
class Steps:
    """Seconds of the steps of one shape, newest last."""

    uncompiled: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    fast: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, seconds: float, eager: bool, use: Use) -> None:
        """A step is over."""
        (self.uncompiled if eager else self.fast).append(seconds)
        if not eager and len(self.uncompiled) >= FEWEST:
            use.gained = (use.gained or 0.0) + statistics.median(self.uncompiled) - seconds

    def in_words(self) -> str:
        """What a step takes, beside what it took before; empty where too few have run."""
        if len(self.fast) < FEWEST:
            return ""
        now = statistics.median(self.fast)
        if len(self.uncompiled) < FEWEST:
            return say("aStep", f"{now:.3f}")
        before = statistics.median(self.uncompiled)
        saved = 1 - now / before
        if abs(saved) < SAME:
            return say("asFast", f"{now:.3f}")
        return say("faster" if saved > 0 else "slower", f"{abs(saved):.0%}", f"{before:.3f}", f"{now:.3f}")


class Status:
    """The line of one Torch Compile Model node.

    Args:
        node: its id in the workflow.
        in_call: a call of the model is in progress; blocks that it has not reached may yet be traced.
    """

    def __init__(self, node: str):
        self.node = node
        self.in_call = False
        self._network: weakref.ref[nn.Module] | None = None
        self._steps: dict[Hashable, Steps] = {}
        self._shape: Hashable = None
        self._step: object = None
        self._began = 0.0
        self._eager: bool | None = None
        self._making_since: float | None = None
        self._graphs_when_ready: int | None = None
        self._told: tuple[str, str] | None = None

    def new_run(self) -> None:
        """Sampling begins: what lies between two runs is no step, and a page that was opened since knows nothing."""
        self._step = self._told = None

    def begins(self, network: nn.Module, step: object, shape: Hashable) -> None:
        """A call of the model begins.

        Args:
            step: the same object for all calls of one step.
            shape: of its input.
        """
        self.in_call = True
        self._network, now = weakref.ref(network), time.perf_counter()
        if step is None or step is self._step:
            return
        if self._step is not None and self._eager is not None and shape == self._shape:
            self._steps.setdefault(shape, Steps()).add(now - self._began, self._eager, use_of(network))
        # The first step also loads the weights.
        self._began, self._eager = now, None if self._step is None else False
        self._step, self._shape = step, shape

    def ends(self, eager: bool, other: bool) -> None:
        """The call is over.

        Args:
            eager: blocks ran uncompiled.
            other: it did what no further step does: compile, capture, measure.
        """
        self.in_call = False
        if other:
            self._eager = None
        elif eager and self._eager is not None:
            self._eager = True
        self.tell()

    def tell(self) -> None:
        """Let the page know, if there is news."""
        found = self.now()
        if found is not None and found != self._told:
            self._told = found
            for listener in listeners:
                listener(self.node, *found)

    def now(self) -> tuple[str, str] | None:
        """State and line; None before the model has run."""
        network = self._network() if self._network is not None else None
        if network is None:
            return None
        groups = code_of(network).groups.values()
        tracing = list(dict.fromkeys(group.class_name for group in groups if group.code.is_tracing))
        if tracing:
            return "compiling", say("preparing", ", ".join(tracing))
        making = list(dict.fromkeys(group.class_name for group in groups if group.is_being_compiled))
        if making:
            self._making_since = self._making_since or time.monotonic()
            return "compiling", say("compiling", ", ".join(making), f"{time.monotonic() - self._making_since:.0f}")
        if self.in_call and self._told is not None and self._told[0] == "compiling":
            return self._told
        self._making_since = None
        graphs = sum(group.stats.graphs for group in groups)
        failed = list(dict.fromkeys(group.class_name for group in groups if group.failure))
        if failed:
            return "failed", say("runsUncompiled", ", ".join(failed))
        if not graphs:
            return None
        self._graphs_when_ready = self._graphs_when_ready or graphs
        more = graphs - self._graphs_when_ready
        words = [self._steps.get(self._shape, Steps()).in_words(), say("since", more) if more else ""]
        details = "; ".join(filter(None, words))
        return "ready", say("readyBut", details) if details else say("ready")


class Line:
    """The line of a node that does not sample.

    Args:
        node: its id in the workflow; None: nobody looks.
    """

    def __init__(self, node: str | None):
        self._node = node
        self._parts: dict[str, str] = {}
        if node is not None:
            statuses[node] = self

    def put(self, part: str, text: str) -> None:
        """Say something, in the place of what was said of that part."""
        self._parts[part] = text
        self.tell()

    def now(self) -> tuple[str, str]:
        return "ready", "; ".join(self._parts.values())

    def tell(self) -> None:
        if self._node is not None:
            for listener in listeners:
                listener(self._node, *self.now())


statuses: weakref.WeakValueDictionary[str, Status | Line] = weakref.WeakValueDictionary()


def status_of(node: str) -> Status:
    """A new one: the node has run anew."""
    statuses[node] = found = Status(node)
    return found


def tell_all() -> None:
    """When a trace begins, and on the worker after each job."""
    for status in list(statuses.values()):
        status.tell()


on_trace.append(tell_all)
