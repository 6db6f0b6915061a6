"""Lower graphs in this process, started by client.py: `python child.py`, with requests on stdin and answers on stdout.

1. The first request holds `sys.path`, the modules to import, the folder of the pack and the cards of this machine; the answer
   tells PyTorch's version.
2. Each later request is a graph (wire.py), the settings of PyTorch under which it was traced, and inductor's options. It is
   lowered on fake tensors, and for a card that this process does not see (stand_in_card.py): it holds no weight, and takes no
   memory of the card. Only where kernels are measured, or it failed so, does a process see the cards.
3. The answer is an artefact as PyTorch serialises it, the files that C++ kernels are loaded from, and the guards that hold
   for its sizes; or why there is none: `failure`, in words for the user, or `inline`, if another way to lower it may work.
4. While it works, it answers `alive` each second: a process that stands still is told from one that is slow.

It ends when its stdin does, so with ComfyUI, and when it has been idle for a minute. What is printed goes to stderr, which
ComfyUI logs.
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
import traceback
import types
from pathlib import Path
from typing import Any, BinaryIO

PROTOCOL = 1
IDLE_SECONDS = 60.0
ALIVE_SECONDS = 1.0
HEADER = struct.Struct("<IQ")
PACKAGE = "torch_compile_kit"
LIBRARIES = {".so", ".dylib", ".pyd", ".dll"}


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """A message: an object and bytes; None at the end of the stream, also in the middle of a message."""
    start = _exactly(stream, HEADER.size)
    if start is None:
        return None
    of_header, of_body = HEADER.unpack(start)
    header, body = _exactly(stream, of_header), _exactly(stream, of_body)
    return None if header is None or body is None else (json.loads(header), body)


def _exactly(stream: BinaryIO, count: int) -> bytes | None:
    content = bytearray()
    while len(content) < count:
        part = stream.read(count - len(content))
        if not part:
            return None
        content += part
    return bytes(content)


def write(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(HEADER.pack(len(text), len(body)) + text + body)
    stream.flush()


class Lowering:
    """What lowers graphs here; imports PyTorch and the engine."""

    def __init__(self, hello: dict[str, Any]):
        package = types.ModuleType(PACKAGE)
        package.__path__ = [hello["pack"]]
        sys.modules[PACKAGE] = package
        import torch

        self.torch = torch
        if hello["cards"]:
            self._of_engine("torch_compat.stand_in_card").stand_in(hello["cards"])
        self._probes: set[str] = set()
        private = self.private = self._of_engine("torch_compat.private")
        for name in hello["modules"]:
            try:
                importlib.import_module(name)
            except Exception as error:  # a graph that needs it says so
                if isinstance(error, OSError) and error.errno is not None:  # the disk is full: another process may import it
                    raise
                sys.stderr.write(f"{name} cannot be imported: {error}\n")
        private.switch("init_gpu_context")[1](lambda *_args: None)
        self._settings = self._of_engine("compile_process.lowering_settings")
        self._wire = self._of_engine("compile_process.wire")
        self._describe = self._of_engine("failures.describe").describe_failure
        self._backend = self._of_engine("inductor.backend")
        self._settings.prepare_process()
        private.maybe_warm_pool()
        if private.compile_fx is None:  # for good: PyTorch's modules bear no second import
            raise ImportError("PyTorch's compiler cannot be imported")

    def versions(self) -> dict[str, str]:
        """Of the code that is on disk now: ComfyUI may have been started before an update."""
        return self._of_engine("cache.environment").versions()

    def _of_engine(self, name: str) -> Any:
        return importlib.import_module(f"{PACKAGE}.engine.{name}")

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            return self._lower(request)
        except Exception as error:
            traceback.print_exc()
            name = type(error).__name__
            if name in ("CannotTravel", "MissingName", "NotSerialisable", "BypassAOTAutogradCache", "BypassFxGraphCache"):
                return {"inline": f"{name}: {error}"[:1500]}, b""
            failure = self._describe("", error)
            return {"failure": [failure.reason, failure.cure, failure.may_pass]}, b""

    def _lower(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            graph, inputs, mode = self._wire.loads(request["graph"])
        except (ImportError, AttributeError) as error:
            raise self._wire.CannotTravel(f"the compile process does not find what it names ({error})") from error
        libraries = _libraries()
        self.private.cpp_kernels.clear()  # so that it tells which kernels this graph has; their files and modules stay
        context = self.private.TracingContext(mode)
        self._settings.set_for_process(request["settings"])
        self.private.inductor_config.unsafe_marked_cacheable_functions = self._settings.cacheable_functions(graph)
        with self._backend.replacements(inputs):
            with self._settings.for_graph(request["settings"]), self.private.tracing(context):
                code = self._backend.inductor(graph, list(inputs), options=request["options"])
            if not hasattr(code, "serialize"):
                raise NotSerialisable("PyTorch gives no artefact for it")
            artefact = self.private.AOTCompiledArtifact(code).serialize()
        files = self._files_of(libraries)
        contents = [Path(_folder(), file).read_bytes() for file in files]
        listed = [[file, len(content)] for file, content in zip(files, contents, strict=True)]
        return {"artefact": len(artefact), "guards": self._wire.guards_of(inputs, mode), "files": listed}, b"".join(
            [artefact, *contents]
        )

    def _files_of(self, before: set[str]) -> list[str]:
        """The libraries that a graph is loaded with. Those that tell what a CPU can are built with the first kernel."""
        kernels, now = set(self.private.cpp_kernels), _libraries()
        new, own = now - before, {file for file in now if Path(file).name.partition(".")[0] in kernels}
        if own:
            self._probes |= {file for file in new - own if not file.startswith("triton/")}
            own |= self._probes
        return sorted(new | own)


class NotSerialisable(Exception):
    pass


def _folder() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def _libraries() -> set[str]:
    """Files that kernels for the CPU are loaded from, relative to inductor's folder."""
    return {file.relative_to(_folder()).as_posix() for file in _folder().rglob("*") if file.suffix in LIBRARIES}


def kill_group(pid: int) -> None:
    """End a compile process and the workers that it has forked, which look only once a minute whether it is there."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


def end() -> None:
    kill_group(os.getpid())  # none where it leads no group
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to all of its processes; ComfyUI decides
    if hasattr(os, "nice"):
        os.nice(19)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory ends, the system ends this process, not ComfyUI
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    incoming = os.fdopen(os.dup(0), "rb")  # workers are forked while a thread reads, and each closes its `sys.stdin` first
    requests: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    writing = threading.Lock()
    works = threading.Event()

    def answer(header: dict[str, Any], body: bytes = b"") -> None:
        with writing:
            write(channel, header, body)

    def listen() -> None:
        while (request := read(incoming)) is not None:
            requests.put(request)
        end()  # ComfyUI is gone, or wants this process to end: at once, whatever it does

    def tell_alive() -> None:
        while True:
            works.wait()
            answer({"alive": True})
            threading.Event().wait(ALIVE_SECONDS)

    hello = read(incoming)
    if hello is None:
        return
    # Behind this Python's own: in ComfyUI PyTorch was imported before other packs put their folders first.
    of_python = [folder for folder in sys.path[1:] if folder]
    sys.path[:] = of_python + [folder for folder in hello[0]["path"] if folder not in of_python]
    sys.argv[1:] = hello[0]["arguments"]
    for run in (listen, tell_alive):
        threading.Thread(target=run, daemon=True).start()
    works.set()
    lowering = Lowering(hello[0])
    answer({"ready": PROTOCOL, "versions": lowering.versions()})
    while True:
        works.clear()
        try:
            _header, body = requests.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            answer({"idle": True})
            end()
        works.set()
        answer(*lowering.answer(json.loads(body)))


if __name__ == "__main__":
    main()
