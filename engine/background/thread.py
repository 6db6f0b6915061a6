"""Compile while images go on: a thread makes the code for calls that ran eager, and nobody waits for it.

It works on stand-ins (`stand_in.py`), so it holds no weights, and what it compiles does not run (`inductor/run_modes.py`).
"""

from __future__ import annotations

import collections
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..failures.describe import is_switched, never_swallowed
from .garbage import full_collections_put_off
from .gate import gate, waiting_at_gate
from .isolation import isolated
from .stand_in import StandIn

logger = logging.getLogger("torch-compile-kit")
# Of memory that is free beside what a job takes; else it waits.
MARGIN = 512 * 2**20
PATIENCE = 5.0
# Seconds for which a thread may keep Python's lock from others. Each operation of another thread's gives the lock away, and it
# waits as long to have it back: 150 of them took 42 ms more with 0.5 ms, 12 ms with this, our thread going on as fast.
INTERVAL = 5e-5
ATTEMPTS = 20


class Compilable(Protocol):
    """What can be compiled for: see `compile/group.py`."""

    def compile_ahead(self, stand_in: StandIn) -> None: ...


@dataclass
class Job:
    """One call for which code is wanted.

    Args:
        group: whose code; a job whose group is gone is over.
        done: called on the thread, also when nothing came of it.
        cached: bytes on the device that PyTorch held and did not use when it was asked for.
        inference, grad, autocast: of the thread that called, which guards compare.
    """

    group: weakref.ref[Compilable]
    stand_in: StandIn
    done: Callable[[], None]
    cached: int
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    autocast: dict = field(init=False)
    attempts: int = 0

    def __post_init__(self) -> None:
        kind = self.stand_in.device.type
        on = torch.is_autocast_enabled(kind)
        self.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": True} if on else {}


class Compiler:
    """The thread, started when there is something to do and over when there is not.

    `makes_room` is the host's: whether weights leave the device when somebody asks for memory. `after_work` is called on the
    thread after each piece of work.

    Args:
        awaited: somebody has asked that sampling waits until nothing is left to do.
    """

    def __init__(self) -> None:
        self.makes_room: Callable[[], bool] = lambda: False
        self.after_work: Callable[[], None] = lambda: None
        self._jobs: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: Job | None = None
        self._interval = 0.0
        self.awaited = False

    def ask(self, group: Compilable, stand_in: StandIn, done: Callable[[], None]) -> None:
        """Compile for a call, as soon as all that was asked for before is done; returns at once."""
        cached = 0 if self.makes_room() else _unused_bytes(stand_in.device)
        with self._changed:
            self._jobs.append(Job(weakref.ref(group), stand_in, done, cached))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torch-compile-kit compile", daemon=True)
                self._thread.start()
                self._interval = sys.getswitchinterval()  # it waits for our lock, so it ends after this
                sys.setswitchinterval(min(self._interval, INTERVAL))

    @property
    def busy(self) -> bool:
        """Whether anything is being compiled, or waits to be."""
        with self._changed:
            return self._thread is not None

    def have_awaited(self) -> bool:
        """From now on sampling waits until nothing is left to do; whether there is anything."""
        with self._changed:  # else it may end in between, and stay awaited
            self.awaited = self._thread is not None
            return self.awaited

    def wait(self, seconds: float | None = None, poll: Callable[[], None] | None = None) -> bool:
        """Until nothing is left to do.

        Args:
            poll: called ten times a second; may raise to stop waiting.

        Returns:
            Whether that came in time.
        """
        end = None if seconds is None else time.monotonic() + seconds
        gate.open()
        while self.busy and (end is None or time.monotonic() < end):
            if poll is not None:
                poll()
            with self._changed:
                self._changed.wait(0.1)
        return not self.busy

    def finish(self, group: Compilable, poll: Callable[[], None]) -> None:
        """Somebody waits for code of `group`: what is being made of it is made, and nothing else is begun for it.

        Args:
            poll: called ten times a second; may raise to stop waiting.
        """
        with self._changed:
            dropped = [job for job in self._jobs if job.group() is group]
            self._jobs = collections.deque(job for job in self._jobs if job.group() is not group)
        for job in dropped:
            job.done()
        gate.open()
        while (current := self._current) is not None and current.group() is group:
            poll()
            with self._changed:
                self._changed.wait(0.1)

    def _run(self) -> None:
        with full_collections_put_off(lambda: gate.is_busy()):
            self._do_all()
            threading.current_thread().name = "torch-compile-kit over"

    def _do_all(self) -> None:
        while (job := self._next()) is not None:
            try:
                again = self._work(job)
            except Exception:  # never the thread: what waits behind it would wait for ever
                logger.exception("compiling in the background stopped for one block group")
                again = False
            self._put_back(job) if again else job.done()
            try:
                self.after_work()
            except Exception:
                logger.exception("what was compiled could not be told")

    def _next(self) -> Job | None:
        with self._changed:
            self._current = self._jobs.popleft() if self._jobs else None
            if self._current is None:
                # Before another thread begins: it would take ours for what was there.
                sys.setswitchinterval(self._interval)
                self._thread = None
                self.awaited = False
            self._changed.notify_all()
            return self._current

    def _put_back(self, job: Job) -> None:
        """There was no memory: once more behind the others, and not at once."""
        with self._changed:
            self._jobs.append(job)
            alone = len(self._jobs) == 1
        if alone:
            time.sleep(PATIENCE)

    def _work(self, job: Job) -> bool:
        """Whether to try again later."""
        group = job.group()
        if group is None:
            return False
        job.attempts += 1
        last = job.attempts >= ATTEMPTS
        if not self.makes_room() and not _has_room(job):
            return not last
        device = job.stand_in.device
        began, waited = time.monotonic(), gate.waited
        with ExitStack() as scopes:
            scopes.enter_context(torch.inference_mode(job.inference))
            scopes.enter_context(torch.set_grad_enabled(job.grad))
            if job.autocast:
                scopes.enter_context(torch.autocast(**job.autocast))
            scopes.enter_context(isolated())
            scopes.enter_context(waiting_at_gate("torch._inductor.compile_fx"))
            if device.type == "cuda":
                scopes.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            try:
                group.compile_ahead(job.stand_in)
            except Exception as error:
                if never_swallowed(error):
                    logger.debug("no memory to compile in the background")
                    return not last
                if is_switched(error):
                    return not last
                raise
        seconds = time.monotonic() - began, gate.waited - waited
        logger.debug("compiled in the background in %.1f s, %.1f s of them waiting for the host", *seconds)
        return False


def _has_room(job: Job) -> bool:
    device = job.stand_in.device
    if device.type != "cuda":
        return True
    free, _total = torch.cuda.mem_get_info(device)
    return free + job.cached > 2 * job.stand_in.nbytes + MARGIN


def _unused_bytes(device: torch.device) -> int:
    """Not on our thread: what asks PyTorch's allocator waits for it with Python's lock in hand, and comfy-aimdo, which works
    inside the allocator, needs that lock for its log."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


compiler = Compiler()
