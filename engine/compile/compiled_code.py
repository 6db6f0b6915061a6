"""What PyTorch has compiled for one block group: made for a call, or ahead of it."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ..background.stand_in import StandIn
from ..cache.disk import current
from ..cache.startup import wait_until_prepared
from ..failures.describe import is_graph_break, is_limit_hit, is_switched, never_swallowed
from ..inductor.run_modes import NotRun, NotTried, ahead, backend_of
from ..inductor.run_modes import state as backend_state
from ..settings import CompileSettings
from ..torch_settings import compile_scope
from .call_shapes import Changed
from .events import monitor, watching
from .fallback import Fallback
from .session import DYNAMIC, STATIC, CompileSession
from .stats import CompileStats

logger = logging.getLogger("torch-compile-kit")
# Code objects that nobody calls any more. Not freed where they are given up: that can be in the middle of PyTorch's freeing of
# the same (a reset), and ends the process.
_unused: list[types.CodeType] = []
# PyTorch 2.13 and later take the limit of a function from its caller; before, it is a setting.
TAKES_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
# The host's: there may be layers in the block that would better be left out of its graphs; whether they are from now on.
leave_out: list[Callable[[nn.Module], bool]] = []
# Two threads that meet a new shape at once would share PyTorch's process-wide settings and counters.
first_call_lock = threading.RLock()


@contextmanager
def first_call(poll: Callable[[], None]) -> Iterator[None]:
    """Alone in `first_call_lock`.

    Args:
        poll: called ten times a second while another thread is in it; may raise to stop waiting.
    """
    while not first_call_lock.acquire(timeout=0.1):
        poll()
    try:
        yield
    finally:
        first_call_lock.release()


@dataclass
class BlockCode:
    """The compiled code of one block group.

    Args:
        name: for reports, its patches included.
        forward: the class's own forward function.
        settings: decides backend, options, shapes and limits.
        folder: name of its folder in the disk cache, and the class of its blocks.
        varying: attributes that hold another number in each block: no constants of the graph (VACE's `block_id`).
        must_run: it cannot be made ahead of a call: it is no single graph, or no copy of a call is like the call.
    """

    name: str
    forward: Callable
    settings: CompileSettings
    folder: tuple[str, str]
    varying: set[str]
    must_run: bool = False
    compiles: int = 0
    stats: CompileStats = field(default_factory=CompileStats)
    _own: Callable | None = None
    _ready: Callable | None = None
    _compiled: Callable | None = None

    def __post_init__(self) -> None:
        self.fallback = Fallback(self.name, self.forward, self.settings, self.stats)

    def call(self, block: nn.Module, args: tuple, kwargs: dict, again: bool = False) -> object:
        """Call compiled code, and note what that compiles.

        Args:
            again: there has been code for such a call, so something else than shapes differs: a float, perhaps.
        """
        beforehand = backend_state.ahead
        if beforehand:
            compiled = self._compile(whole=True)
        elif self._compiled is None:
            compiled = self._compiled = self._compile(whole=self.settings.fullgraph)
        else:
            compiled = self._compiled
        changed = Changed(() if beforehand else (args, kwargs))
        session = CompileSession(self.name, changed.keep, functools.partial(self._switches, again), self.folder)
        limited = self.stats.graphs >= min(self.settings.variant_limit, 8)
        if limited:
            limit = self.settings.variant_limit
            own = {} if TAKES_LIMIT else {"recompile_limit": limit}
            compile_scope.enter(accumulated_recompile_limit=4 * limit, fail_on_recompile_limit_hit=True, **own)
        monitor.calls.append(session)
        try:
            return compiled(block, *args, **kwargs)
        except NotRun:
            return None
        except Exception as error:
            if not is_limit_hit(error) and (not session.started or never_swallowed(error)):
                raise
            if not changed.put_back() or (beforehand and is_switched(error)):
                raise
            if not is_limit_hit(error) and any(left_out(block) for left_out in leave_out):
                return None if beforehand else self.forward(block, *args, **kwargs)
            if beforehand and is_graph_break(error) and not self.settings.fullgraph:
                self.must_run = True
                return None
            cache = current()
            if is_limit_hit(error) or cache is None or not cache.heal(self.folder[0], error):
                if not beforehand:
                    return self.fallback.after(error, block, args, kwargs)
                failure = self.fallback.of(error)
                if failure is not None:
                    self.fallback.give_up(failure)
                return None
        finally:
            monitor.calls.pop()
            session.close()
            if limited:
                compile_scope.exit()
            if session.started:
                self.compiles += 1
                self.stats.add(session.stats())
        return self.call(block, args, kwargs, again)  # what was damaged on disk is gone: once more

    def run_ready(self, block: nn.Module, args: tuple, kwargs: dict) -> object:
        """Run the block eager where there is no code for this very call that has been tried; compiles none."""
        if self._ready is None:
            return self.forward(block, *args, **kwargs)
        backend_state.declines = True
        try:
            return self._ready(block, *args, **kwargs)
        except NotTried:
            return self.forward(block, *args, **kwargs)
        finally:
            backend_state.declines = False

    def compile_ahead(self, stand_in: StandIn) -> None:
        """On a thread of its own: make the code for such a call, of which nothing runs; `again` as for `call`."""
        if self.fallback.failure is not None or self.must_run:
            return
        self.stats.seconds += wait_until_prepared()
        with first_call_lock, watching, ahead(stand_in.holds):
            block, args, kwargs = stand_in.made()
            self.call(block, args, kwargs, stand_in.again)

    def _compile(self, whole: bool) -> Callable:
        """torch.compile of a private copy of the forward.

        PyTorch keeps compiled code per code object, with one limit for all users of it. A copy of the code gives each group
        and setting its own, and frees it with this object.

        Args:
            whole: as one graph, or not at all.
        """
        if self._own is None:
            source = self.forward
            own = types.FunctionType(
                source.__code__.replace(), source.__globals__, source.__name__, source.__defaults__, source.__closure__
            )
            own.__kwdefaults__ = source.__kwdefaults__
            own.__qualname__ = source.__qualname__
            self._own, self._ready = own, torch._dynamo.run(own)
            weakref.finalize(self, _unused.append, own.__code__).atexit = False
        options = self.settings.inductor_options() or None
        limit = {"recompile_limit": self.settings.variant_limit} if TAKES_LIMIT else {}
        return torch.compile(self._own, backend=backend_of(self.settings.backend), fullgraph=whole, options=options, **limit)

    def variants(self) -> list[object] | None:
        """The guards of the code that PyTorch holds now (a reset drops what was compiled); None where it does not tell."""
        if not hasattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list"):
            return None
        entries = _cache_entries(self._own.__code__) if self._own is not None else []
        found = [entry.guard_manager for entry in entries]
        return [guards for guards in found if type(guards).__name__ != "DeletedGuardManagerWrapper"]

    def _switches(self, again: bool) -> dict[str, object]:
        """The numbers in which blocks differ, as Dynamo names them, after those that the user has set.

        Floats are constants until they are seen to differ: as a symbol, the epsilon of a norm had PyTorch trace a block twice
        (torch/fx/passes/_tensorify_python_scalars.py).
        """
        owner = self.forward.__code__.co_varnames[0]
        sources = [f"L['{owner}'].{name}" for name in sorted(self.varying)]
        named = ",".join([s for s in (getattr(torch.compiler.config, "dynamic_sources", ""),) if s] + sources)
        shapes = STATIC if self.settings.dynamic == "false" else {**DYNAMIC, "specialize_float": not again}
        return {**shapes, "dynamic_sources": named}


def free_unused() -> None:
    """Free what PyTorch has compiled of them.

    It never does so itself: its table of originals (`orig_code_map`) holds the code object as long as its compiled code lives,
    which the code object holds; graphs, guards and a name in the module of the block's class would stay for each freed model.
    """
    while _unused:
        torch._C._dynamo.eval_frame.reset_code(_unused.pop())


def _cache_entries(code: types.CodeType) -> list:
    """What PyTorch has compiled of a code object (torch/csrc/dynamo/eval_frame.c); a reset empties it."""
    return torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
