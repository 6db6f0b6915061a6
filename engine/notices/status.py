"""Show a line on a node in the page: whether its model compiles, and what the steps have taken since."""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ..compile.compiled_code import on_trace
from ..compile.registry import code_of
from ..per_model import PerModel
from .words import told

# How many of the last steps are compared, and how few are not.
KEPT, FEWEST = 40, 3
# How many pages get one node's line. Scripts may queue each prompt under another name.
MOST_OWNERS = 8
# By which share two medians of equal work may differ.
SAME = 0.02


class News(NamedTuple):
    """The line of a node, as the page gets it.

    Args:
        state: compiling, ready, unclear, slower or failed; empty: there is no line.
        says: one of `words.told`, or several, to stand side by side.
        seconds: for so long already; the page goes on counting.
    """

    state: str = ""
    says: list | tuple = ()
    seconds: int | None = None


# Whose prompt runs: the client's id and its workflow's, each None where there is none. Set by the server's routes.
Owner = tuple[str | None, str | None]
owner_now: Callable[[], Owner] = lambda: (None, None)  # noqa: E731
# Called with the owner of a page, the node and its line.
listeners: list[Callable[[Owner, str, News], None]] = []


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

    def compared(self) -> tuple[str, list]:
        """The state of the line, and what a step takes beside what it took before; empty where too few have run.

        Nothing is claimed while the middle halves of both overlap: the same work takes another time beside other programs.
        """
        if len(self.fast) < FEWEST:
            return "ready", []
        now = statistics.median(self.fast)
        if len(self.uncompiled) < FEWEST:
            return "ready", told("aStep", f"{now:.3f}")
        low, before, high = statistics.quantiles(self.uncompiled, n=4)
        lowest, _, highest = statistics.quantiles(self.fast, n=4)
        if highest < low and now < before * (1 - SAME):
            return "ready", told("faster", f"{1 - now / before:.0%}", f"{before:.3f}", f"{now:.3f}")
        if lowest > high and now > before * (1 + SAME):
            return "slower", told("slower", f"{now / before:.2f}", f"{before:.3f}", f"{now:.3f}")
        return "unclear", told("noDifference", f"{now:.3f}")


class Line:
    """A line of text that the page shows on a node.

    Args:
        node: its id in the workflow; None: the line is shown nowhere.
    """

    def __init__(self, node: str | None):
        self.node = node
        self._parts: dict[str, tuple[list, bool]] = {}
        self._register()  # last: from then on other threads call `now`

    def put(self, part: str, says: list, good: bool = False) -> None:
        """Say something about a part of the model, in place of what the line said about that part before.

        Args:
            says: see `words.told`.
            good: the part has become faster.
        """
        self._parts[part] = says, good
        self._register()
        self.tell()

    def now(self) -> News | None:
        """What the line says; None: as before."""
        parts = list(self._parts.values())
        if not parts:
            return News()
        return News("ready" if any(good for _, good in parts) else "unclear", [says for says, _ in parts])

    def tell(self) -> None:
        """Send the line to the pages of its owners."""
        self._send(self.now() or News())

    def _register(self) -> None:
        """Make the owner of the prompt that runs the last of this line's owners, and drop the first beyond MOST_OWNERS."""
        if self.node is not None:
            owner = owner_now()
            statuses.pop((owner, self.node), None)
            statuses[owner, self.node] = self
            for former in self._owners()[:-MOST_OWNERS]:
                statuses.pop((former, self.node), None)

    def _owners(self) -> list[Owner]:
        return [owner for owner, _node, line in _registered() if line is self]

    def _send(self, news: News) -> None:
        for owner in self._owners():
            for listener in listeners:
                listener(owner, str(self.node), news)


class Status(Line):
    """The line of a node that compiles a model: whether it compiles, and what a step takes.

    Args:
        node: its id in the workflow.
        in_call: a call of the model is in progress; blocks that it has not reached may yet be traced.
    """

    def __init__(self, node: str):
        self.in_call = False
        self._network: weakref.ref[nn.Module] | None = None
        self._steps: dict[Hashable, Steps] = {}
        self._shape: Hashable = None
        self._step: object = None
        self._began = 0.0
        self._eager: bool | None = None
        self._compiling_since: float | None = None
        self._graphs_when_ready: int | None = None
        self._sent: News | None = None
        super().__init__(node)  # last: from then on other threads call `now`

    def new_run(self) -> None:
        """Sampling begins: the time between two runs is no step, and a page that was opened since has no line yet."""
        self._register()
        self._step = self._sent = None

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

    def stopped(self) -> None:
        """The call was cancelled, ended with an error, or is none that is timed."""
        self.in_call = False
        self.tell()

    def tell(self) -> None:
        """Send the line if its state or words have changed; the page counts the seconds."""
        news = self.now()
        if news is None and self._was_compiling():
            news = News()  # the network was freed: nobody compiles for it
        if news is not None and (self._sent is None or news[:2] != self._sent[:2]):
            self._sent = news
            self._send(news)

    def _was_compiling(self) -> bool:
        return self._sent is not None and self._sent.state == "compiling"

    def now(self) -> News | None:
        """None before the model has run."""
        network = self._network() if self._network is not None else None
        if network is None:
            return None
        groups = code_of(network).groups.values()
        tracing = dict.fromkeys(group.class_name for group in groups if group.code.is_tracing)
        if tracing:
            return News("compiling", told("preparing", ", ".join(tracing)))
        compiling = dict.fromkeys(group.class_name for group in groups if group.is_being_compiled)
        if compiling:
            self._compiling_since = self._compiling_since or time.monotonic()
            seconds = int(time.monotonic() - self._compiling_since)
            return News("compiling", told("compilingFor", ", ".join(compiling)), seconds)
        if self.in_call and self._was_compiling():
            return self._sent
        self._compiling_since = None
        graphs = sum(group.stats.graphs for group in groups)
        failed = dict.fromkeys(group.class_name for group in groups if group.failure)
        if failed:
            return News("failed", told("runsUncompiled", ", ".join(failed)))
        if not graphs:
            return News()
        self._graphs_when_ready = self._graphs_when_ready or graphs
        more = graphs - self._graphs_when_ready
        state, steps = self._steps.get(self._shape, Steps()).compared()
        details = [said for said in (steps, told("since", more) if more else []) if said]
        return News(state, told("readyBut", details) if details else told("ready"))


# By the owner of the prompt in which the node ran, and the node's id: two workflows, or users, may have the same ids.
# A line has several owners where ComfyUI took the node's output from its cache: for a copy of the workflow, or another user.
statuses: weakref.WeakValueDictionary[tuple[Owner, str], Line] = weakref.WeakValueDictionary()


def _registered() -> list[tuple[Owner, str, Line]]:
    refs = statuses.valuerefs()  # at once: other threads add to them meanwhile
    return [(*ref.key, line) for ref in refs if (line := ref()) is not None]


def live_lines() -> list[Line]:
    """The lines of all nodes that are in use, each once."""
    return list(dict.fromkeys(line for _owner, _node, line in _registered()))


def lines_of(client: str | None = None, workflow: str | None = None) -> dict[str, News]:
    """The lines by node; None: of all clients, of all workflows."""
    lines = {}
    for owner, node, line in _registered():
        news = line.now()
        if news is not None and client in (None, owner[0]) and workflow in (None, owner[1]):
            lines[node] = news
    return lines


def tell_all() -> None:
    """When a trace begins, and on the worker after each job."""
    for line in live_lines():
        line.tell()


on_trace.append(tell_all)
