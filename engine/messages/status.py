"""Show a line on a node in the page: whether its model is being compiled, and how long its steps take."""

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ..compile.compiled_code import on_trace
from ..compile.registry import ModelCode, WaitsFor, code_of
from ..per_model import Same
from ..settings import CompileSettings
from .recompile_log import Watch, watch_of
from .words import COMPILED_ELSEWHERE, told

# Steps that are compared, at most and at least.
KEPT, FEWEST = 40, 3
# For how many inputs steps are kept; each prompt length is another input.
MOST_INPUTS = 32
# The most pages that get one node's line: scripts may queue each prompt under another client_id.
MOST_OWNERS = 8
MOST_LINES = 200
# Share by which two medians of equal work may differ.
SAME = 0.02


class News(NamedTuple):
    """The line of a node, as the page gets it."""

    state: str = ""  # compiling, ready, faster, unclear, slower or failed; empty: there is no line
    says: list | tuple = ()  # a text of `words.told`, or a list of such texts
    seconds: int | None = None  # seconds that compiling has taken so far; the page goes on counting
    begins: str | None = None  # what the page sends to start compiling now; None: compiling has begun, or ended


BEGINS_NEXT = News("unclear", told("beginsNext"))
# The ids of the client whose prompt runs and of its workflow, or None. nodes/routes.py sets `owner_now`.
Owner = tuple[str | None, str | None]
owner_now: Callable[[], Owner] = lambda: (None, None)  # noqa: E731
# Called with the owner of a page, the node and its line.
listeners: list[Callable[[Owner, str, News], None]] = []


@dataclass
class Steps:
    """Seconds of steps with equal work, newest last; `fast`: compiled, or replayed from CUDA graphs.

    Args:
        is_fast: whether the last step was one of `fast`.
    """

    uncompiled: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    fast: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    is_fast: bool = False

    def add(self, seconds: float, eager: bool, watch: Watch) -> None:
        self.is_fast = not eager
        (self.uncompiled if eager else self.fast).append(seconds)
        if not eager and len(self.uncompiled) >= FEWEST:
            before = statistics.median(self.uncompiled)
            watch.gained = (watch.gained or 0.0) + before - seconds
            if len(self.fast) >= FEWEST:
                watch.saved = 1 - statistics.median(self.fast) / before

    def compared(self) -> tuple[str, list]:
        """The state of the line, and a comparison of fast steps with uncompiled ones; empty if too few have run.

        While the middle halves of both overlap, neither is called faster: other programs may have used the GPU.
        """
        if len(self.fast) < FEWEST:
            return "ready", []
        now = statistics.median(self.fast)
        if len(self.uncompiled) < FEWEST:
            return "ready", told("aStep", f"{now:.3f}")
        low, before, high = statistics.quantiles(self.uncompiled, n=4)
        lowest, _, highest = statistics.quantiles(self.fast, n=4)
        if highest < low and now < before * (1 - SAME):
            return "faster", told("faster", f"{1 - now / before:.0%}", f"{before:.3f}", f"{now:.3f}")
        if lowest > high and now > before * (1 + SAME):
            return "slower", told("slower", f"{now / before:.2f}", f"{before:.3f}", f"{now:.3f}")
        return "unclear", told("noDifference", f"{now:.3f}")


class Line:
    """A line of text that the page shows on a node. `node`: its id in the workflow; None: the line is shown nowhere."""

    _told: News | None = None  # what the pages were told last; None: nothing in this run

    def __init__(self, node: str | None):
        self.node = node
        self._parts: dict[str, tuple[list, bool]] = {}
        self._register()  # last: from then on other threads call `now`

    def put(self, part: str, says: list, good: bool = False) -> None:
        """Set the text (see `words.told`) about one part of the model, and send the line.

        Args:
            good: the part has become faster.
        """
        self._parts[part] = says, good
        self._register()
        self.tell()

    def now(self) -> News | None:
        """The line as it is now: the texts of all parts; empty `News` if there are none."""
        parts = list(self._parts.values())
        if not parts:
            return News()
        return News("faster" if any(good for _, good in parts) else "unclear", [says for says, _ in parts])

    def tell(self, news: News | None = None) -> None:
        """Send `news`, or else the line as it is now, to the line's pages if state or text have changed."""
        told, news = self._told, news or self.now()
        if news is not None and (told is None or news[:2] != told[:2]):
            self._told = news
            for owner in self._owners():
                _send(owner, self.node, news)

    def new_run(self) -> None:
        """Send the line also to a page that was opened since the node ran: ComfyUI took the node's output from its cache."""
        if owner_now() not in self._owners():
            self._register()
            self._told = None
            self.tell()

    def _register(self) -> None:
        """Add the running prompt's owner as the last owner of this line, and drop the first owners beyond MOST_OWNERS."""
        if self.node is not None:
            key = owner_now(), self.node
            lines.pop(key, None)  # newest last
            lines[key] = self
            for former in self._owners()[:-MOST_OWNERS]:
                lines.pop((former, self.node), None)
            for oldest in list(lines)[:-MOST_LINES]:
                lines.pop(oldest, None)

    def _owners(self) -> list[Owner]:
        return [owner for (owner, _node), line in list(lines.items()) if line is self]


class Status(Line):
    """The line of a node that compiles a model: whether the model is being compiled, and how long a step takes.

    The worker thread calls `tell` too, and may change any attribute between two reads.
    """

    def __init__(self, node: str, settings: CompileSettings):
        if (former := lines.get((owner_now(), node))) is not None:
            self._told = former._told  # until the model runs
        self._settings = settings
        self.left: list | None = None  # why nothing of the model is compiled, see `words.told`
        self.in_call = False  # a call is in progress: blocks that it has not reached may yet be traced
        self._network: weakref.ref[nn.Module] | None = None
        self._steps: dict[Hashable, Steps] = {}
        self._inputs: list[Hashable] = []
        self._last: tuple = ()
        self._step: Same | None = None
        self._began = 0.0
        self._eager: bool | None = None
        self._compiling_since: float | None = None
        super().__init__(node)  # last: from then on other threads call `now`

    def new_run(self) -> None:
        """Forget the last step, as the time between two runs is no step, and send the line to pages that were opened since."""
        self._register()
        self._step = self._told = self.left = None

    def begins(self, network: nn.Module, step: object, inputs: Hashable) -> None:
        """Note that a call of the model begins.

        Args:
            step: the same object for all calls of one step.
            inputs: shapes of the call's inputs; steps are compared if all their calls have the same shapes, or the compiled
                ones larger shapes.
        """
        self.in_call = True
        self._network, now = weakref.ref(network), time.perf_counter()
        if step is None:
            return
        if Same(step) == self._step:
            self._inputs.append(inputs)
            return
        if self._inputs[:1] != [inputs]:
            self._last = ()
        elif self._step is not None and self._eager is not None:
            self._last = tuple(self._inputs)
            steps = self._steps[self._last] = self._steps.pop(self._last, Steps())  # newest last
            steps.add(now - self._began, self._eager, watch_of(network))
            if len(self._steps) > MOST_INPUTS:
                del self._steps[next(iter(self._steps))]
        # None: the first step is not timed, as it also loads the weights.
        self._began, self._eager = now, None if self._step is None else False
        self._step, self._inputs = Same(step), [inputs]

    def ends(self, eager: bool, one_off: bool) -> None:
        """Note the end of a call.

        Args:
            eager: blocks ran uncompiled.
            one_off: the call included one-time work (compiling, capturing, measuring), so its step is not timed.
        """
        self.in_call = False
        if one_off:
            self._eager = None
        elif eager and self._eager is not None:
            self._eager = True
        self.tell()

    def stopped(self) -> None:
        """Note that the call was cancelled, ended with an error, or is not timed."""
        self.in_call = False
        self.tell()

    def _was_compiling(self) -> bool:
        return (self._told or News()).state == "compiling"

    def now(self) -> News | None:
        if (left := self.left) is not None:
            return News("unclear", left)
        network = self._network() if self._network is not None else None
        if network is None:  # not run yet, or freed: nothing is compiled for it
            return News() if self._was_compiling() else self._told
        code = code_of(network)
        groups = code.groups_of(self._settings)
        pending = [group for group in groups if group.code.is_being_lowered]
        kinds = len({group.class_name for group in pending})
        is_tracing = any(group.code.is_tracing for group in groups)
        if kinds or is_tracing:
            since = self._compiling_since = self._compiling_since or time.monotonic()
            compiling = told("compilingKind") if kinds == 1 else told("compilingKinds", kinds)
            if pending and all(group.code.is_only_read for group in pending):
                compiling = told("readingFromDisk")
            elif self.in_call and self._settings.waits:
                compiling = told("compilingFirst")
            elif is_tracing:
                compiling = told("preparing")
            return News("compiling", told("forSeconds", compiling), int(time.monotonic() - since))
        if self.in_call and self._was_compiling():
            return self._told
        self._compiling_since = None
        if any(taken.is_compiled for taken in code.taken):
            return News("unclear", COMPILED_ELSEWHERE)
        failed = dict.fromkeys(group.class_name for group in groups if group.failure)
        failed |= dict.fromkeys(failure.block for failure in code.failures)
        if failed:
            return News("failed", told("runsUncompiled", ", ".join(failed)))
        if not any(group.stats.graphs for group in groups):
            return self._before_compiling(network, code)
        if (lacks := watch_of(network).lacks()) is not None:
            runs, name = lacks
            if not runs:
                return BEGINS_NEXT
            return News("unclear", told("putOff", runs), begins=name)
        state, steps = self._compared()
        if (left := watch_of(network).left_slower) is not None:
            state, steps = "slower", left
        says = told("readyBut", steps) if steps else told("ready")
        pack = watch_of(network).foreign
        return News(state, says if pack is None else [says, told("graphsOff", pack)])

    def _before_compiling(self, network: nn.Module, code: ModelCode) -> News:
        put_off, pack, (state, steps) = watch_of(network).put_off(), watch_of(network).foreign, self._compared()
        runs, name = put_off or (None, None)
        if runs == 0 or (runs is None and code.waits_for is WaitsFor.IMPORT and not code.uncalled):
            return BEGINS_NEXT
        says = [told("putOff", runs)] if runs else []
        if pack is not None:
            says.append(told("graphsOff", pack))
        elif steps and self._steps[self._last].is_fast:  # else the graphs were dropped, for example because memory is short
            says.insert(0, told("replayed", steps))
        else:
            state = "ready"
        state = "unclear" if pack is not None or state == "ready" else state
        return News(state, says if len(says) > 1 else says[0], begins=name) if says else News()

    def _compared(self) -> tuple[str, list]:
        """As `Steps.compared`. If too few steps of the same inputs ran uncompiled, compare with uncompiled steps of a shorter
        prompt: these compute less, so only the result `faster` is certain."""
        steps = self._steps.get(self._last, Steps())
        for inputs, others in list(self._steps.items())[::-1]:
            if len(steps.uncompiled) < FEWEST and _is_at_most(inputs, self._last):
                compared = Steps(others.uncompiled, steps.fast).compared()
                if compared[0] == "faster":
                    return compared
        return steps.compared()


def _is_at_most(inputs: Any, others: Any) -> bool:
    """Whether `inputs` equal `others`, except for numbers that are smaller."""
    if isinstance(inputs, tuple) and isinstance(others, tuple):
        return len(inputs) == len(others) and all(map(_is_at_most, inputs, others))
    return inputs == others or (type(inputs) is type(others) is int and inputs <= others)


# By owner, since two workflows, or users, may have nodes of the same id. A line has several owners if ComfyUI took the node's
# output from its cache: for a copy of the workflow, or another user. A line stays when ComfyUI frees the node's output, as it
# does when another workflow runs.
lines: dict[tuple[Owner, str], Line] = {}


def _send(owner: Owner, node: str | None, news: News) -> None:
    for listener in listeners:
        listener(owner, str(node), news)


def forget_line(node: str | None) -> None:
    """Remove the line of a node in the prompt that runs."""
    if node is not None:
        lines.pop((owner_now(), node), None)
        _send(owner_now(), node, News())


def lines_of(client: str | None = None, workflow: str | None = None) -> dict[str, News]:
    """The lines by node id, of two lines with one id the newer; None: the lines of all clients, or of all workflows."""
    of_page = [
        (node, line.now())
        for (owner, node), line in list(lines.items())
        if client in (None, owner[0]) and workflow in (None, owner[1])
    ]
    return {node: news for node, news in of_page if news is not None}


def tell_all() -> None:
    """Send all lines that have changed; called when a trace begins, and by the worker thread after each job."""
    for line in list(lines.values()):
        line.tell()


def tell_begun(begins: str) -> None:
    """Update the lines, after the user has started compiling for the models whose lines have this `begins`.

    Lines that still have it are of models that ComfyUI has freed.
    """
    tell_all()
    for line in list(lines.values()):
        if (told := line._told) is not None and told.begins == begins:
            line.tell(BEGINS_NEXT)


on_trace.append(tell_all)
