"""Processes of ComfyUI for the faults that need one of their own: to be killed, to have no room, to share a cache.

Importing PyTorch's compiler and asking it what the machine can takes longer than all the rest, so one process does that and
forks for each that is wanted. It reads a line of JSON for each: {"base", "actions"}, or {"wait": pid}.
What a fork does is in `ACTIONS`; its answer lies in BASE/answer-PID.json, also that of one that is killed.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import restart
from support import torch_settings

# One kind of block is enough here; the tests in this process have whole models.
BLOCKS = "single_blocks.*"
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Lock:
    """PyTorch's lock, after which the thread that held it goes on a little later, as it does in one of many cases."""

    def __init__(self):
        self.lock = threading.RLock()

    def acquire(self, timeout=-1):
        return self.lock.acquire(timeout=timeout)

    def release(self):
        self.lock.release()
        time.sleep(0.05)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


def wait_for_imports():
    """They set what they need, for the process."""
    for thread in threading.enumerate():
        if thread.name == "torch-compile-kit import":
            thread.join(60)


class Process:
    """One process of ComfyUI from its start to its end."""

    def __init__(self, pack, base, patcher, expected):
        import folder_paths
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        os.setpgid(0, 0)
        self.pack, self.base, self.patcher, self.expected = pack, Path(base), patcher, expected
        self.compiled, self.waits = None, True
        self.answer = {"runs": [], "raised": [], "said": []}
        folder_paths.set_user_directory(str(self.base / "user"))
        (self.base / "tmp").mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = __import__("tempfile").tempdir = str(self.base / "tmp")
        os.environ["HOME"] = str(self.base / "home")
        for name in FOLDERS:  # PyTorch's own choice for the process before would count as the user's
            os.environ.pop(name, None)
        cache_dir()  # its own for this one
        log = os.open(self.base / f"log-{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.answer["said"].append(record.getMessage())
        logger = logging.getLogger("torch-compile-kit")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)  # in the log file: what the compile process prints

    def module(self, name):
        return importlib.import_module(f".{name}", self.pack.__name__)

    def put(self, path, replacement):
        """Replace a function that is reached from the pack: engine.cache.archive._parsed."""
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, self.pack)
        assert hasattr(owner, name), f"no {path}: it would never be called"
        setattr(owner, name, replacement)

    def act(self, actions):
        from comfy.model_management import InterruptProcessingException

        for action in actions:
            name, _, given = action.partition("=")
            try:
                getattr(self, name)(*([given] if given else []))
            except (Exception, InterruptProcessingException) as error:  # told in the answer
                self.answer["raised"].append([action, type(error).__name__, str(error), traceback.format_exc()])

    def settings(self):
        return {**torch_settings(), "switch interval": sys.getswitchinterval()}

    def write(self):
        self.unlimit()
        (self.base / f"answer-{os.getpid()}.json").write_text(json.dumps(self.answer))

    # Actions

    def behind(self):
        """From now on code is made in the background."""
        self.waits = False

    def run(self):
        """A run with the node, as each prompt does; in the background all is made before it ends."""
        from devtools import tiny_models

        compile = "before first image" if self.waits else "in background"
        settings = self.module("engine.settings").CompileSettings(compile_when=compile, only_blocks=BLOCKS)
        self.compiled = self.module("engine.host.model.attach").attach(self.patcher, settings)
        code = self.module("engine.compile.registry").code_of(self.patcher.model.diffusion_model)
        code.eager_calls = 0
        wait_for_imports()
        before = self.settings()
        result = restart.one_step(self.compiled, *tiny_models.conditioning("flux"))
        stats = self.module("engine.messages.report").stats_for(self.patcher.model.diffusion_model, settings)
        ended = self.module("engine.background.thread").compiler.wait(120)
        wait_for_imports()
        self.answer["runs"].append(
            {
                "error": float((result - self.expected).abs().max() / self.expected.abs().max()),
                "graphs": stats.graphs,
                "from_disk": stats.from_disk,
                "eager": code.eager_calls,
                "failures": [group.failure.message() for group in code.groups.values() if group.failure],
                "codes": sum(len(group.code.variants()) for group in code.groups.values()),
                "not_as_found": {
                    **({} if ended else {"compiler": "busy"}),
                    **{n: "forward" for n, m in self.patcher.model.diffusion_model.named_modules() if "forward" in vars(m)},
                    **{n: value for n, value in self.settings().items() if value != before[n]},
                },
            }
        )

    def save(self, name):
        self.answer["saved"] = self.module("engine.host.nodes.cache_files").save_cache(self.compiled, name)[1]

    def load(self, name):
        self.answer["loaded"] = self.module("engine.host.nodes.cache_files").load_cache(name)

    def forget(self):
        """What is compiled is dropped from memory, as when the model is freed."""
        import torch

        torch._dynamo.reset()
        self.module("engine.compile.registry").code_of._values.clear()
        registry = self.module("engine.compile.registry")
        registry._groups.clear()
        registry._recent.clear()
        torch._dynamo.utils.counters.clear()

    def trim(self):
        self.module("engine.host.model.user_folder").open_users_store().trim()

    def clear(self):
        self.module("engine.host.model.user_folder").open_users_store().clear()

    def limit(self, size="4096"):
        """As on a full disk: no file can grow beyond so many bytes, not those of compilers either."""
        for pid in filter(None, (os.getpid(), self.compile_process.pid)):
            with contextlib.suppress(ProcessLookupError):  # it has been idle
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else int(size), hard))

    def unlimit(self):
        self.limit(None)

    @property
    def compile_process(self):
        return self.module("engine.compile_process.client").compile_process

    @property
    def store(self):
        return self.base / "user" / "torch-compile-kit" / "store"

    def clock(self, seconds):
        """The clock that programs read is set by so much, from now on."""
        found, shift = time.time, float(seconds)
        time.time = lambda: found() + shift

    def in_step(self, action):
        """In each step from now on, inside the model."""
        network = self.patcher.model.diffusion_model
        network.final_layer.register_forward_pre_hook(lambda *_: self.act([action]))

    def wait_for(self, pipe):
        """Until another process opens the pipe; once."""
        if not self.answer.get("waited"):
            self.answer["waited"] = True
            with open(pipe) as opened:
                opened.read()

    def vanish(self):
        shutil.rmtree(self.store)

    def fail(self, where):
        """From now on that function of the engine, or of a module that it imports, raises: FUNCTION:ERROR."""
        name, _, error = where.partition(":")
        made = {"memory": MemoryError("no memory"), "io": OSError(5, "Input/output error")}[error]
        self.put(name, lambda *_args, **_kwargs: (_ for _ in ()).throw(made))

    def cancel(self):
        """The user's cancel: taken up at the next place where the host looks."""
        import comfy.model_management

        comfy.model_management.interrupt_current_processing()

    def spoil(self):
        """Entries are cut off as soon as they are written, as by a loss of power."""
        module = self.module("engine.cache.code_store")
        write = module.write_whole

        def write_and_cut(file, content):
            write(file, content)
            os.truncate(file, len(content) // 2)
            self.answer["spoiled"] = file.name

        module.write_whole = write_and_cut

    def block(self):
        """A file comes into the place of the store, once."""
        if self.store.is_dir():
            self.store.rename(self.store.with_name("kept"))
            self.store.write_text("not a folder")

    def kill(self, where="now"):
        """kill -9: now, as soon as the C++ compiler has source, or when a function of the engine is called."""

        def die(*_args, **_kwargs):
            self.write()
            os.killpg(0, signal.SIGKILL)

        if where == "now":
            die()
        elif where == "compiling":
            folders = os.environ["PATH"].split(os.pathsep)  # g++ itself: a copy of its result would be there too soon
            os.environ["PATH"] = os.pathsep.join(folder for folder in folders if Path(folder).name != "compilers")

            def watch():
                while not any((self.base / "tmp").rglob("*.cpp")):
                    time.sleep(0.01)
                self.answer["compile process"] = self.compile_process.pid
                die()

            threading.Thread(target=watch, daemon=True).start()
        else:
            self.put(where, die)

    def reset(self):
        """Another pack's thread resets Dynamo whenever something is traced: each reset begins while it is."""
        import torch
        from torch._dynamo import convert_frame

        convert_frame.compile_lock = Lock()
        tracing = threading.Event()

        def resets():
            while True:
                tracing.wait()
                tracing.clear()
                torch._dynamo.reset()
                self.answer["resets"] = self.answer.get("resets", 0) + 1

        threading.Thread(target=resets, daemon=True).start()
        module = self.module("engine.compile.traced_graph")
        request_for = module.request_for

        def traced(*args):
            tracing.set()
            return request_for(*args)

        module.request_for = traced


def serve():
    sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() not in (restart.ROOT, restart.ROOT / "tests")]
    pack = restart.load_pack(sys.argv[1])
    import torch
    import tqdm

    from devtools import tiny_models

    tqdm.tqdm.monitor_interval = 0  # no thread of its own
    import plain_cpp

    importlib.import_module(".engine.host.model.user_folder", pack.__name__).REGISTERING += (plain_cpp.__name__,)
    restart.plain_compile(2.0)
    patcher = tiny_models.build_patcher("flux")
    with torch.inference_mode():
        expected = restart.one_step(patcher, *tiny_models.conditioning("flux"))
    assert threading.active_count() == 1, threading.enumerate()  # a fork has only the thread that forks
    print("READY", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        try:
            with torch.inference_mode():
                process = Process(pack, asked["base"], patcher, expected)
                process.act(asked["actions"])
                process.write()
        finally:
            os._exit(0)


if __name__ == "__main__":
    serve()
