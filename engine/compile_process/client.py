"""Run the compile process (child.py): start it, send graphs and receive code, notice when the process has died or hangs.

The worker thread calls `compile_process.lower`, one graph at a time, and waits without the GIL. `lower` raises `Lost` if a
second process was lost with the same graph; `NotStarted` if no process has started, or `Postponed` if nobody waits for the
graph; `Outdated` after an update on disk; and `Unavailable` where no process can be started: then graphs are lowered in the
call that traced them.
"""

import contextlib
import math
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..background.thread import Postponed, compiler
from ..cache.environment import variables, versions
from ..failures.describe import DescribedError
from ..files import files_in, locked
from ..log import logger
from ..threads import started
from ..torch_compat import stand_in_card
from . import child
from .artefact import Code, LowerInline

# The longest time without a sign of life: while the process starts (slow core, cold disk), and later (the process may swap).
START_SECONDS, SILENT_SECONDS = 180.0, 60.0
# The longest time for one graph; `max-autotune` takes minutes.
LONGEST_SECONDS = 1800.0
# The most workers of inductor, which compile the kernels of a graph.
MOST_WORKERS = 8
# Users set the opposite against stale caches, or to try something; then PyTorch makes no code that can be sent back.
CACHEABLE = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_FREEZING": "0",
}
# At start, folders of killed servers are removed: nobody holds their lock. The lock of a younger folder may not be held yet.
SCRATCH, LOCK, UNLOCKED_SECONDS = "torch-compile-kit-loaded-", "in-use", 60.0
# If no process starts for a graph, graphs that nobody waits for stay uncompiled for BACK_OFF_SECONDS. After UNSTARTED_GRAPHS in
# a row, all graphs are lowered in the call that traced them, for LONG_BACK_OFF_SECONDS. Then a start is tried again.
BACK_OFF_SECONDS, UNSTARTED_GRAPHS, LONG_BACK_OFF_SECONDS = 60.0, 3, 600.0


class Unavailable(LowerInline):
    """Tell why no compile process can be started here at present."""


class Lost(DescribedError):
    """Tell how the compile process ended while it lowered a graph."""

    def __init__(self, ending: str, what: str = "was lost"):
        cure = "It is tried again with the next image. If that happens each time, the compiler lacks memory (RAM) or crashes."
        super().__init__(f"the compile process {what}: {ending}.", cure, True)


class NotStarted(Lost):
    """Tell why the compile process did not start. A later start may succeed."""

    def __init__(self, ending: str):
        super().__init__(ending.rstrip("."), "does not start")


class Outdated(DescribedError):
    """Nothing can be compiled until ComfyUI is restarted; not in the call either, where old and new modules would mix."""

    def __init__(self, reason: str):
        super().__init__(reason, "Start ComfyUI anew.", may_pass=True)


class LoweringFailed(DescribedError):
    """A graph could not be lowered: the words of `describe_failure`, as the compile process found them."""


@dataclass(frozen=True)
class Refusal:
    """Why no process is asked: until the time `until` (`time.monotonic`), `error` is raised for each graph, or if it is
    `Postponed`, for each graph that nobody waits for."""

    error: type[Exception]
    reason: str
    until: float = math.inf


def folders(scratch: Path) -> dict[str, str]:
    """Environment variables that name inductor's and Triton's folders, in the compile process and where code is loaded."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "TRITON_CACHE_DIR": str(scratch / "triton")}


def _may_hold_code(place: Path) -> bool:
    """Whether libraries can be built in `place` and loaded: not where programs may not run (`mount -o noexec`), nor where C++
    compilers get the path in pieces, as PyTorch splits an unquoted command line (torch/_inductor/cpp_builder.py)."""
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK) or re.search(r"[\s'\"\\]", place.as_posix()):
        return False
    return not hasattr(os, "ST_NOEXEC") or not os.statvfs(place).f_flag & os.ST_NOEXEC  # Linux


def _private_folder() -> Path:
    places = [Path(os.path.expanduser("~"), ".cache"), *([Path("/tmp")] if os.name == "posix" else [])]
    with contextlib.suppress(OSError):  # no such folder can be written
        places.insert(0, Path(tempfile.gettempdir()))
    places = [place for place in places if place.is_absolute()]  # not if the user has no home
    if not places:
        raise FileNotFoundError("no folder for temporary files can be written, and this user has no home")
    place = next(filter(_may_hold_code, places), places[0])
    for left in files_in(place, f"{SCRATCH}*"):  # left by servers that were killed
        with contextlib.suppress(OSError):
            if hasattr(os, "geteuid") and left.lstat().st_uid != os.geteuid():
                continue  # another user's, whose content may be made to harm
            if time.time() - left.stat().st_mtime > UNLOCKED_SECONDS and (lock := locked(left / LOCK)) is not None:
                lock.close()
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))


@dataclass(eq=False)
class _Running:
    process: subprocess.Popen
    sees_cards: bool
    answers: queue.Queue = field(default_factory=queue.Queue)
    is_ready: bool = False
    last_words: str = ""

    def listen(self) -> None:
        stream: Any = self.process.stdout
        with contextlib.suppress(Exception):  # the stream holds no messages
            child.skip_to_greeting(stream)
            while (answer := child.read(stream)) is not None:
                self.answers.put(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):  # so that `end` can tell how the process ended
            self.process.wait(1.0)
        self.answers.put(None)
        self.process.wait()
        with contextlib.suppress(OSError):  # where ComfyUI is PID 1, the workers are its children now
            while hasattr(os, "killpg"):
                os.waitpid(-self.process.pid, 0)

    def log(self) -> None:
        stream = self.process.stderr
        assert stream is not None
        for line in stream:
            said = line.decode(errors="replace").rstrip()
            logger.debug("compile process: %s", said)
            self.last_words = said or self.last_words

    def end(self) -> str:
        """End the process and its workers; returns in words whether and how the process had already ended."""
        assert self.process.stdin is not None
        code = self.process.poll()
        child.kill_group(self.process.pid)
        if code is None:
            self.process.kill()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        if code is None:
            return "it did not answer"
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with {code}"


class CompileProcess:
    """The compile process of this server, if there is one."""

    def __init__(self) -> None:
        # Returns the modules to import in the process: they register what graphs name (ComfyUI's layouts of quantised weights).
        self.modules: Callable[[], list[str]] = list
        self.started = 0
        self.refusal: Refusal | None = None
        self._unstarted = 0  # graphs in a row for which no process has started
        self._running: _Running | None = None
        self._lock = threading.Lock()
        self._making_scratch = threading.Lock()
        self._scratch: Path | None = None
        self._scratch_lock: Any = None
        self._scratch_of: int | None = None  # PID of the process that made the folder

    def check(self, patient: bool = False) -> None:
        """Raise the refusal that is in force: `Outdated`, `Unavailable` or, for a patient graph (see `lower`), `Postponed`."""
        refusal = self.refusal
        if refusal is not None and time.monotonic() < refusal.until and (patient or refusal.error is not Postponed):
            raise refusal.error(refusal.reason)

    @property
    def pid(self) -> int | None:
        running = self._running
        return running.process.pid if running is not None and running.process.poll() is None else None

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported the compiler."""
        return self._running is not None and self._running.is_ready

    @property
    def scratch(self) -> Path:
        """The folder of this server for the files that kernels are loaded from."""
        with self._making_scratch:
            if self._scratch is None or not self._scratch.exists():  # a cleaner of temporary files may have removed it
                folder = _private_folder()
                self._scratch, self._scratch_lock, self._scratch_of = folder, locked(folder / LOCK), os.getpid()
            with contextlib.suppress(OSError):  # a cleaner that removed the old lock would let another server remove the folder
                os.utime(self._scratch / LOCK)
            return self._scratch

    def start(self) -> None:
        """Start the process unless it runs: its imports take seconds, while a model is loaded."""
        if self._lock.acquire(blocking=False):  # else the process is at work
            try:
                self._ensure()
            except (NotStarted, Unavailable, Outdated) as error:  # a graph tries again
                logger.debug("%s", error)
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Called at exit, also while a graph is lowered. Not in a process that a node has forked: all belongs to its parent."""
        if self._scratch_of not in (None, os.getpid()):
            return
        self.refusal = Refusal(Unavailable, "ComfyUI ends")
        running, self._running = self._running, None
        if running is not None and running.process.poll() is None:
            running.end()
        if self._scratch is not None:
            if self._scratch_lock is not None:
                self._scratch_lock.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def lower(self, request: str, patient: bool = False, measures: bool = False) -> Code:
        """The code of a graph; LowerInline: PyTorch gives no artefact for it. Other errors: see the module.

        Args:
            request: the text of a `Request`.
            patient: nobody waits for the code.
            measures: lowering runs kernels, so the process must see the cards, and takes memory of one.
        """
        self.check(patient)
        failed: LoweringFailed | None = None
        with self._lock:
            try:
                return self._ask(request, patient, measures)
            except LoweringFailed as error:
                if self._running is None or self._running.sees_cards:
                    raise
                failed = error  # lowering may have asked the card what the stand-in does not answer
            except Lost as error:
                logger.warning("%s Another one is started.", error)
            try:
                return self._ask(request, patient, measures=True)  # without the stand-in
            except Lost as error:
                if failed is not None:
                    raise failed from error
                if isinstance(error, NotStarted):
                    self._unstarted += 1
                    if self._unstarted >= UNSTARTED_GRAPHS:
                        self._refuse(Unavailable, str(error), LONG_BACK_OFF_SECONDS)
                    self._refuse(Postponed, str(error), BACK_OFF_SECONDS, patient)
                raise

    def _refuse(self, error: type[Exception], reason: str, seconds: float = math.inf, patient: bool = False) -> None:
        """Ask no process for `seconds`, and raise what `check` raises."""
        if error is Unavailable or patient:
            meanwhile = "code is compiled in the step that needs it" if error is Unavailable else "blocks run uncompiled"
            again = "" if seconds == math.inf else f" It is tried again after {seconds:.0f} s."
            logger.warning("%s: %s%s", meanwhile, reason, again)
        if self.refusal is None or self.refusal.until < math.inf:
            self.refusal = Refusal(error, reason, time.monotonic() + seconds)
        self.check(patient)

    def _ask(self, request: str, patient: bool, measures: bool) -> Code:
        running = self._ensure(measures)
        if not running.is_ready:
            there = self._answer(running, START_SECONDS)[0].get("versions", {})
            # A package that the process lacks does not count: the failure of each graph names it, with the cure.
            changed = [f"{n} {old} to {there[n]}" for n, old in versions().items() if there.get(n, old) not in (old, "none")]
            if changed:
                self._end(running)
                self._refuse(Outdated, f"updated while ComfyUI runs: {', '.join(changed)}")
            running.is_ready, self._unstarted = True, 0
        self._send(running, {"patient": patient}, request.encode())
        header, body = self._answer(running, SILENT_SECONDS)
        if "idle" in header:  # the process ended as the request came
            self._end(running)
            return self._ask(request, patient, measures)
        if "inline" in header:
            raise LowerInline(header["inline"])
        try:
            if "code" in header:
                return Code.unpacked(body)
            failure = LoweringFailed(*header["failure"])
        except (KeyError, TypeError, ValueError) as error:
            self._end(running)
            raise Lost("its answer cannot be read") from error
        if failure.may_pass:  # a module that was imported while the disk was full stays broken
            self._end(running)
        raise failure

    def _end(self, running: _Running) -> str:
        self._running = None
        return running.end()

    def _send(self, running: _Running, header: dict[str, Any], body: bytes = b"") -> None:
        """Write a message on a separate thread, as a process that hangs does not read."""
        stream: Any = running.process.stdin

        def send() -> None:
            with contextlib.suppress(OSError, ValueError):  # the process is gone, which `_answer` notices
                child.write(stream, header, body)

        started(threading.Thread(target=send, name="torch-compile-kit pipe", daemon=True))

    def _answer(self, running: _Running, silent: float) -> tuple[dict[str, Any], bytes]:
        """The next answer other than `alive`."""
        began = heard = time.monotonic()
        while True:
            try:
                answer = running.answers.get(timeout=1.0)
            except queue.Empty:
                now = time.monotonic()
                # After a crash of the process its own workers (inductor's) may keep the pipe open.
                if running.process.poll() is None and now - heard < silent and now - began < LONGEST_SECONDS:
                    continue
                answer = None
            if answer is None:
                ending = self._end(running)
                if running.is_ready:
                    raise Lost(ending)
                raise NotStarted(f"{ending} ({running.last_words[:300]})" if running.last_words else ending)
            if "alive" not in answer[0]:
                return answer
            heard = time.monotonic()

    def _ensure(self, measures: bool = False) -> _Running:
        """The process that runs, or a new one."""
        self.check()
        if self._running is not None and self._running.process.poll() is not None:
            self._running = None  # it is not ended again: its PID may be another process's by now
        if self._running is not None and measures and not self._running.sees_cards:
            self._end(self._running)
        if self._running is None:
            self._running = self._start(measures)
        return self._running

    def _start(self, measures: bool) -> _Running:
        if not os.path.basename(sys.executable or "").lower().startswith(("python", "pypy")):
            self._refuse(Unavailable, f"{sys.executable or 'nothing'} is no Python that could be started once more")
        # Without fork, PyTorch's workers need `pass_fds`, which Windows lacks.
        workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 2) // 2)) if hasattr(os, "fork") else 1
        try:
            scratch = folders(self.scratch)
        except OSError as error:
            raise NotStarted(f"no folder can be made for it ({error})") from error
        cards = [] if measures else stand_in_card.describe()
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(workers),
            "TORCHINDUCTOR_WORKER_START": "fork",
            **variables(),
            **scratch,
            **CACHEABLE,
            # Workers that are not forked would not know the stand-in cards.
            **({"CUDA_VISIBLE_DEVICES": "-1", "TORCHINDUCTOR_WORKER_START": "fork"} if cards else {}),
        }
        try:
            process = subprocess.Popen(
                [sys.executable, *(["-s"] if sys.flags.no_user_site else []), child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0)
                | getattr(subprocess, "CREATE_NO_WINDOW", 0),
                start_new_session=True,  # ignored on Windows; see `child.kill_group`
            )
        except OSError as error:
            raise NotStarted(f"no process can be started ({error})") from error
        running = _Running(process, not cards)
        for run in (running.listen, running.log):
            if not started(threading.Thread(target=run, name="torch-compile-kit pipe", daemon=True)):
                running.end()
                raise NotStarted("no thread can be started")
        hello = {
            "pack": str(Path(__file__).parents[2]),
            "path": [folder for folder in sys.path if isinstance(folder, str)],
            "modules": self.modules(),
            "cards": cards,
        }
        self._send(running, hello)
        self.started += 1
        return running


compile_process = CompileProcess()
compiler.at_exit.append(compile_process.stop)
