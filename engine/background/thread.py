"""Queue jobs for one worker thread, which gets and loads the code of traced graphs while sampling continues.

The first job starts the thread; the thread exits when the queue is empty.
"""

import atexit
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from ..failures.describe import lacks_memory
from ..log import logger
from ..threads import in_one_piece, started

# Attempts in all for a job that runs out of memory; seconds until such a job, or a postponed one, is retried.
ATTEMPTS, RETRY_SECONDS = 20, 5.0
EXIT_SECONDS = 10.0


class Postponed(Exception):
    """Raised by a job that cannot run now: the job is retried every RETRY_SECONDS, any number of times."""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all jobs on a device: PyTorch's allocator reuses freed memory only on the stream that allocated it."""
    return torch.cuda.Stream(device)


@dataclass(eq=False)
class Job:
    """Work for the worker thread."""

    owner: weakref.ref  # a job whose owner was freed is dropped
    action: Callable[[], None]
    device: torch.device
    # Called on the worker with an error after which the job is not retried.
    on_error: Callable[[Exception], None] = lambda error: logger.warning("work in the background failed", exc_info=error)
    awaited: bool = False  # a thread waits for the job: the job is not retried later when memory is short
    error: BaseException | None = None  # for the thread that waits; an Exception goes to `on_error` instead
    is_kept: bool | None = None  # the job's code is on disk, and only has to be read; None: the job makes no code of a model
    is_queued: bool = False  # the job was submitted; it may be over
    over: bool = False
    attempts: int = 0  # how many attempts have run out of memory
    due: float = 0.0  # the job does not run before, by `time.monotonic`; ignored if `awaited`


@dataclass
class Compiler:
    """The job queue and its worker thread."""

    after_work: Callable[[], None] = lambda: None  # called on the worker after each job
    at_exit: list[Callable[[], None]] = field(default_factory=list)  # each ends what a job may wait for (the compile process)
    awaited: bool = False  # sampling waits until the queue is empty
    _jobs: list[Job] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _at_work: Job | None = None
    _is_stopped: bool = False

    def submit(self, job: Job) -> None:
        """Queue a job, unless it was submitted before. If no thread can be started, or the process ends, the job is over."""
        with self._changed:
            if job.is_queued:
                return
            job.is_queued = True
            if self._thread is None and not self._is_stopped:
                thread = threading.Thread(target=in_one_piece, args=[self._run], name="torch-compile-kit compile", daemon=True)
                self._thread = thread if started(thread) else None
            if self._thread is None or self._is_stopped:
                job.over = True
                return
            self._jobs.append(job)
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        return self._thread is not None

    @property
    def makes_code(self) -> bool:
        """Whether the running job, or one in the queue, makes code that is not on disk."""
        with self._changed:
            return any(job is not None and job.is_kept is False for job in (self._at_work, *self._jobs))

    def have_awaited(self, pending: bool = False) -> bool:
        """Make sampling wait until the queue is empty; returns whether there is a job to wait for. `pending`: a call in
        progress will queue one."""
        with self._changed:  # else the worker may empty the queue before the assignment, and `awaited` would stay True
            self.awaited = pending or self._thread is not None
            return self.awaited

    def wait(self, seconds: float = math.inf, poll: Callable[[], None] = lambda: None) -> bool:
        """Wait until the queue is empty; False after `seconds`. `poll` is called ten times a second and may raise."""
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            poll()
            with self._changed:
                self._changed.wait_for(lambda: not self.busy, 0.1)
        if not self.busy:
            self.awaited = False
        return not self.busy

    def finish(self, job: Job, poll: Callable[[], None]) -> None:
        """Run `job` soon, and wait until it is over. `poll` is called ten times a second and may raise."""
        job.awaited = True
        self.submit(job)
        with self._changed:
            self._changed.notify_all()
        try:
            while not job.over:
                poll()
                with self._changed:
                    self._changed.wait_for(lambda: job.over, 0.1)
        finally:
            job.awaited = False

    def stop(self) -> None:
        """Stop the worker when the process exits: a thread that is still inside PyTorch would abort the process."""
        with self._changed:
            self._is_stopped = True
            for job in self._jobs:
                job.over = True
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        for end in self.at_exit:
            end()
        if thread is not None:
            thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._work(job)
            with _logged("the page could not be updated"):
                self.after_work()

    def _next(self) -> Job | None:
        with self._changed:
            while self._jobs:
                due = [job for job in self._jobs if job.awaited or job.due <= time.monotonic()]
                job = min(due, key=lambda job: not (job.awaited or job.is_kept), default=None)  # awaited jobs and reads first
                if job is not None:
                    self._jobs.remove(job)
                    self._at_work = job
                    return job
                self._changed.wait(min(job.due for job in self._jobs) - time.monotonic())
            self._thread = self._at_work = None
            self.awaited = False
            self._changed.notify_all()
            return None

    def _work(self, job: Job) -> None:
        retries = False
        try:
            if job.owner() is not None:
                with torch.cuda.stream(_stream(job.device)) if job.device.type == "cuda" else nullcontext():
                    job.action()
        except Exception as error:
            no_memory = lacks_memory(error)
            job.attempts += no_memory
            retries = isinstance(error, Postponed) or (no_memory and not job.awaited and job.attempts < ATTEMPTS)
            if not retries:
                with _logged("a failure could not be reported"):
                    job.on_error(error)
        except BaseException as error:  # raised again on the thread that waits; the worker must go on with other jobs
            job.error = error
        with self._changed:
            if retries and not self._is_stopped:
                job.due = time.monotonic() + RETRY_SECONDS
                self._jobs.append(job)
            else:
                job.over = True
            self._changed.notify_all()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error instead of raising it: the worker would end, and later jobs would wait for ever."""
    try:
        yield
    except Exception:
        logger.exception(what)


compiler = Compiler()
atexit.register(compiler.stop)
