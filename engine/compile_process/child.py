"""Lower graphs in this process, started by client.py: `python child.py`, with requests on stdin and answers on stdout.

1. The first request holds `sys.path`, the modules to import, the folder of the pack and the cards of this machine; the answer
   tells the versions in this process.
2. Each later request is a graph (wire.py), the settings of PyTorch under which it was traced, and inductor's options. The graph
   is lowered on fake tensors, for a card that this process does not see (stand_in_card.py): so the process holds no weights and
   takes no GPU memory. The process sees the cards only if kernels are autotuned, or if lowering for the stand-in has failed.
3. The answer is packed code (artefact.py), or says why there is none: `failure`, in words for the user, or `inline`, if the
   graph may be lowered in the call that traced it.
4. While the process works, it answers `alive` each second, so that a slow process can be told from one that hangs.

The process ends when stdin is closed, as it is when ComfyUI ends, and after a minute without a request, with the answer `idle`.
Prints go to stderr, which ComfyUI logs.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, BinaryIO

IDLE_SECONDS = 60.0
# How long after the start a small graph is lowered (`warm_up`), unless a request has come.
UNASKED_SECONDS = 0.5
ALIVE_SECONDS = 1.0
# Nice values of the session: on busy cores, a tenth of the time while nobody waits for code, else an equal share.
BESIDE, AWAITED = 10, 0
HEADER = struct.Struct("<IQ")
PACKAGE = "torch_compile_kit"
GREETING = b"\ntorch-compile-kit: messages follow\n"


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """A message: an object and bytes; None at the end of the stream, also in the middle of a message."""
    start = stream.read(HEADER.size)
    if len(start) < HEADER.size:
        return None
    of_header, of_body = HEADER.unpack(start)
    header, body = stream.read(of_header), stream.read(of_body)
    return (json.loads(header), body) if len(header) + len(body) == of_header + of_body else None


def write(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(HEADER.pack(len(text), len(body)) + text + body)
    stream.flush()


def skip_to_greeting(stream: BinaryIO) -> None:
    """Skip what was printed before the messages: modules that Python imports when it starts (sitecustomize, .pth) may print."""
    seen = b""
    while not seen.endswith(GREETING) and (byte := stream.read(1)):
        seen = (seen + byte)[-len(GREETING) :]


def engine(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.engine.{name}")


def lowering_for(hello: dict[str, Any]) -> Any:
    """Import lowering.py as a part of the pack, after the modules that register what graphs refer to by name."""
    sys.modules[PACKAGE] = package = types.ModuleType(PACKAGE)
    package.__path__ = [hello["pack"]]
    if hello["cards"]:
        engine("torch_compat.stand_in_card").stand_in(hello["cards"])
    for name in hello["modules"]:
        with logged(f"{name} cannot be imported"):
            importlib.import_module(name)
    return engine("compile_process.lowering")


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error: if a graph depends on what failed, lowering that graph fails and says so."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk is full: another process may have room
            raise
        sys.stderr.write(f"{what}: {error}\n")


def kill_group(pid: int) -> None:
    """End a compile process and its forked workers, which check only once a minute whether the process is still there."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def end() -> None:
    kill_group(os.getpid())  # does nothing where this process leads no group
    os._exit(0)


def take_share(nice: int) -> None:
    """Set this process's share of busy cores where Linux divides cores among sessions: this process leads a session, and
    `os.nice` counts only within a session (man 7 sched, "The autogroup feature")."""
    for _ in range(5):
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(nice))
            return
        except BlockingIOError:  # Linux accepts ten writes a second, from all processes together
            time.sleep(0.15)
        except OSError:  # no autogroups, or no Linux
            return


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all of its processes; ComfyUI decides
    if hasattr(os, "nice"):
        os.nice(19)
    take_share(BESIDE)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the system kills this process, not ComfyUI
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    channel.write(GREETING)
    channel.flush()
    incoming = os.fdopen(os.dup(0), "rb")  # workers are forked while a thread reads, and each closes its `sys.stdin` first
    with open(os.devnull, "rb") as nothing:  # not the pipe for compilers: on Windows they would wait for the thread that reads
        os.dup2(nothing.fileno(), 0)
    requests: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    writing = threading.Lock()
    works = threading.Event()

    def answer(header: dict[str, Any], body: bytes = b"") -> None:
        with writing:
            write(channel, header, body)

    def listen() -> None:
        while (request := read(incoming)) is not None:
            requests.put(request)
        end()  # ComfyUI is gone, or wants this process to end: at once, also while a graph is lowered

    def tell_alive() -> None:
        while True:
            works.wait()
            answer({"alive": True})
            threading.Event().wait(ALIVE_SECONDS)

    hello = read(incoming)
    if hello is None:
        return
    # ComfyUI's folders after this Python's own: in ComfyUI, PyTorch was imported before other packs put their folders first.
    of_python = [folder for folder in sys.path[1:] if folder]
    sys.path[:] = of_python + [folder for folder in hello[0]["path"] if folder not in of_python]
    for run in (listen, tell_alive):
        threading.Thread(target=run, daemon=True).start()
    works.set()
    lowering = lowering_for(hello[0])
    lowering.prepare()
    answer({"versions": engine("cache.environment").versions()})  # of the code on disk now: ComfyUI may run older code
    is_cold = bool(hello[0]["cards"])  # without stand-ins the small graph would be loaded on a card
    while True:
        works.clear()
        try:
            header, body = requests.get(timeout=UNASKED_SECONDS if is_cold else IDLE_SECONDS)
        except queue.Empty:
            if is_cold:  # nobody waits: a model is being loaded
                is_cold = False
                works.set()
                with logged("a small graph cannot be lowered"):
                    lowering.warm_up()
                continue
            answer({"idle": True})  # a request may be on its way
            end()
        is_cold = False
        works.set()
        take_share(BESIDE if header["patient"] else AWAITED)
        answer(*lowering.answer(json.loads(body)))


if __name__ == "__main__":
    main()
