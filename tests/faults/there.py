"""The faults that need processes of their own; see `table.THERE` and `process.py`."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OTHER = "0" * 12  # another model's folder in the cache
HOUR = 3600
DAY = 86400


class Zygote:
    """The process that starts the others."""

    def __init__(self, base):
        variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_COMPILE_KIT_CACHE_GIB")
        environment = {name: value for name, value in os.environ.items() if name not in variables}
        (base / "tmp").mkdir(parents=True)
        environment |= {
            "TMPDIR": str(base / "tmp"),
            "HOME": str(base / "home"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment["MALLOC_PERTURB_"] = "165"  # glibc overwrites what is freed: who still uses it crashes, each time
        command = [sys.executable, str(Path(__file__).parent / "process.py"), str(base)]
        self.errors = open(base / "log.txt", "w+")  # noqa: SIM115  until the end
        self.process = subprocess.Popen(
            command, env=environment, cwd=base, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        while (line := self.process.stdout.readline()) and line != "READY\n":
            pass
        assert line, self.log()

    def log(self):
        self.errors.seek(0)
        return self.errors.read()

    def ask(self, **asked):
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.log()
        return int(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.errors.close()


class Machine:
    """A folder with ComfyUI's user folder in it, in which processes run.

    Args:
        warm: another machine, which has compiled; its files are copied.
    """

    def __init__(self, base, zygote, moment, warm=None):
        self.base, self.zygote, self.moment = base, zygote, moment
        self.kit = base / "user" / "torch-compile-kit"
        self.cache = self.kit / "cache"
        if warm is not None:
            shutil.copytree(warm.base / "user", base / "user")
        for folder in (self.kit, self.cache, self.cache / OTHER):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        self.others = {
            self.cache / OTHER / "about.json": b'{"class": "Other"}',
            self.cache / OTHER / "fxgraph" / "entry": b"code of another model",
            self.kit / "other.tckcache": b"a file of the user's",
        }
        for file, content in self.others.items():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)

    @property
    def saved(self):
        return self.kit / "mine.tckcache"

    @property
    def folder(self):
        """Of the kind."""
        (folder,) = (about.parent for about in self.cache.glob("*/about.json") if about.parent.name != OTHER)
        return folder

    def start(self, *actions):
        before = ["behind"] if self.moment == "background" else []
        return self.zygote.ask(base=str(self.base), actions=[*before, *actions])

    def end(self, pid, status=0):
        ended = self.zygote.ask(wait=pid)
        log = self.base / f"log-{pid}.txt"
        assert ended == status, f"the process ended with {ended}\n{log.read_text()[-4000:]}"
        file = self.base / f"answer-{pid}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def process(self, *actions, status=0):
        """One process from its start to its end; its answer."""
        return self.end(self.start(*actions), status)

    def killed(self, *actions):
        return self.process(*actions, status=-signal.SIGKILL)

    def keeps_the_others(self, but=()):
        for file, content in self.others.items():
            assert file in but or file.read_bytes() == content, file

    def leftovers(self):
        return [f for f in self.kit.rglob("*") if f.name.startswith("incoming-") or f.suffix in (".partial", ".tmp")]


def right(answer, *runs, eager=False):
    """Whether these runs of a process (all, if none are named) were right and, unless `eager`, compiled."""
    assert answer["runs"], answer
    for run in [answer["runs"][i] for i in runs] if runs else answer["runs"]:
        assert run["error"] < 1e-5 and not run["not_as_found"], answer
        assert eager or (run["graphs"] == 1 == run["codes"] and not run["eager"] and not run["failures"]), answer
    return True


def read(answer):
    """Whether the code came from the disk."""
    assert answer["runs"][0]["from_disk"] == 1, answer
    return right(answer, 0)


def refused(answer, action, *words, error="CacheFileError"):
    (raised,) = answer["raised"]
    assert raised[0] == action and raised[1] == error, raised
    assert all(word in raised[2] for word in words), raised
    return True


def next_process(machine):
    """In the background the first run is eager, whatever is on the disk."""
    answer = machine.process("run", "run")
    assert not answer["raised"], answer
    return right(answer, *([1] if machine.moment == "background" else [0, 1])) and right(answer, eager=True)


# Rows of the table


def cannot_save(machine):
    before = machine.saved.read_bytes()
    assert refused(machine.process("run", "fail=engine.cache.archive._pack:io", "save=mine"), "save=mine", "cannot be written")
    assert machine.saved.read_bytes() == before and not machine.leftovers()
    right(machine.process("run", "save=mine"))


def reset_meanwhile(machine):
    answer = machine.process("reset", *["run", "forget"] * 4, "run")
    assert answer["resets"] >= 4, answer
    right(answer, eager=True)


def no_memory_to_load(machine):
    shutil.rmtree(machine.folder)
    answer = machine.process("fail=engine.cache.archive.zipfile.ZipFile.extractall:memory", "load=mine.tckcache")
    assert refused(answer, "load=mine.tckcache", error="MemoryError") and not machine.leftovers()
    assert read(machine.process("load=mine.tckcache", "run"))


def cut_libraries(machine):
    libraries = list(machine.folder.rglob("*.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, 100)
        os.utime(library, (time.time() - HOUR,) * 2)
    answer = machine.process("run", "run")
    assert right(answer) and "compiled anew" in str(answer["said"]), answer


def flipped_graphs(machine):
    draw = random.Random(16)
    entries = [f for part in ("fxgraph", "aotautograd") for f in (machine.folder / part).rglob("*") if f.is_file()]
    assert len(entries) >= 2
    for entry in entries:
        content = bytearray(entry.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        entry.write_bytes(content)
    right(machine.process("run", "run"))


def empty_descriptions(machine):
    (machine.folder / "about.json").write_bytes(b"")
    read(machine.process("run", "run"))
    assert json.loads((machine.folder / "about.json").read_text())["class"] == "SingleStreamBlock"


def flipped_file(machine):
    content = bytearray(machine.saved.read_bytes())
    content[len(content) // 2] ^= 1
    machine.saved.write_bytes(content)
    shutil.rmtree(machine.folder)
    answer = machine.process("load=mine.tckcache", "run")
    assert "damaged" in answer["loaded"] and not answer["raised"] and not machine.leftovers(), answer
    assert right(answer) and not answer["runs"][0]["from_disk"], answer


def vanished_cache(machine):
    answer = machine.process("run", "vanish", "run", "forget", "run")
    assert right(answer) and not answer["raised"], answer
    return machine.cache


def half_library(machine):
    shutil.rmtree(machine.folder)
    answer = machine.process("spoil", "run", "run")
    assert answer.get("spoiled") and "compiled anew" in str(answer["said"]), answer
    assert right(answer, 1) and right(answer, eager=machine.moment == "background"), answer
    machine.moment = "start"
    assert read(machine.process("run"))


def unreadable_descriptions(machine):
    answer = machine.process("fail=engine.cache.disk.read_json:io", "run", "run")
    assert right(answer) and "cannot be used" in str(answer["said"]), answer
    assert read(machine.process("run"))


def no_memory_to_read(machine):
    answer = machine.process("fail=engine.compile.traced_graph.inductor:memory", "run")
    assert refused(answer, "run", "no memory", error="MemoryError")
    assert read(machine.process("run"))


def cancelled_saving(machine):
    answer = machine.process("run", "cancel", "save=mine", "run", "run")
    assert refused(answer, "run", error="InterruptProcessingException") and right(answer) and len(answer["runs"]) == 2, answer
    shutil.rmtree(machine.folder)
    assert read(machine.process("load=mine.tckcache", "run")) and not machine.leftovers()


def full_disk_sampling(machine):
    answer = machine.process("run", "in_step=limit=0", "run", "unlimit", "run")
    assert right(answer) and not answer["raised"], answer


def blocked_cache(machine):
    answer = machine.process("run", "in_step=block", "run", "run")
    assert right(answer) and not answer["raised"], answer
    machine.cache.unlink()
    machine.cache.with_name("kept").rename(machine.cache)
    assert read(machine.process("run"))


def full_disk(machine):
    answer = machine.process("limit", "run", "run", "unlimit", "run", "run", "run")
    assert right(answer, -1) and right(answer, eager=True), answer
    shown = str(answer["said"])
    assert "cannot be used" in shown or "could not be compiled" in shown, shown


def full_disk_saving(machine):
    before = machine.saved.read_bytes()
    answer = machine.process("run", "limit", "save=mine")
    assert refused(answer, "save=mine", "cannot be written") and machine.saved.read_bytes() == before
    assert not machine.leftovers() and right(answer)


def full_disk_loading(machine):
    shutil.rmtree(machine.folder)
    answer = machine.process("limit", "load=mine.tckcache")
    assert "not written" in answer["loaded"] and not answer["raised"] and not machine.leftovers(), answer
    assert read(machine.process("load=mine.tckcache", "run"))


def full_disk_reading(machine):
    read(machine.process("limit=0", "run"))


def killed_compiling(machine):
    machine.killed("kill=compiling", "run")
    assert machine.folder
    next_process(machine)


def killed_sampling(machine):
    machine.killed("run", "in_step=kill", "run")
    assert read(machine.process("run"))


def killed_saving(machine):
    before = machine.saved.read_bytes()
    machine.killed("run", "kill=engine.cache.archive._write_digest", "save=mine")
    assert machine.saved.read_bytes() == before
    _later(machine)
    assert right(machine.process("run", "save=mine")) and not machine.leftovers()
    assert machine.saved.read_bytes() != before or machine.saved.stat().st_size == len(before)


def killed_loading(machine):
    shutil.rmtree(machine.folder)
    machine.killed("kill=engine.cache.archive.zipfile.ZipFile.extractall", "load=mine.tckcache")
    assert [f.name for f in machine.cache.iterdir() if not f.name.startswith("incoming-")] == [OTHER]
    _later(machine)
    answer = machine.process("load=mine.tckcache", "run", "trim")
    assert read(answer) and not answer["raised"] and not machine.leftovers(), answer


def killed_reading(machine):
    machine.killed("kill=engine.compile.traced_graph.inductor", "run")
    assert read(machine.process("run"))


def _later(machine):
    """More than an hour has gone by since the kill."""
    found = machine.leftovers()
    assert found
    for file in found:
        os.utime(file, (time.time() - 2 * HOUR,) * 2)


def read_only_kind(machine):
    """A file in the place of the folder stops the administrator, too."""
    folder = machine.folder
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    answer = machine.process("run", "run")
    assert right(answer, 1) and right(answer, eager=True) and "cannot be used" in str(answer["said"]), answer
    folder.unlink()
    next_process(machine)


def read_only_saving(machine):
    machine.saved.unlink()
    machine.saved.mkdir()  # cannot be replaced by a file
    answer = machine.process("run", "save=mine")
    assert refused(answer, "save=mine", "cannot be written") and not machine.leftovers()
    assert right(answer)


def read_only_cache(machine):
    kept = machine.cache.rename(machine.kit / "kept")
    machine.cache.write_text("not a folder")
    answer = machine.process("run", "run")
    assert right(answer) and "cannot be used" in str(answer["said"]), answer
    machine.cache.unlink()
    kept.rename(machine.cache)
    assert read(machine.process("run"))


def two_compile(machine):
    shutil.rmtree(machine.folder)
    both = [machine.start("run", "run") for _ in range(2)]
    for answer in [machine.end(pid) for pid in both]:
        assert right(answer, 1) and right(answer, eager=machine.moment == "background"), answer
    machine.moment = "start"
    assert read(machine.process("run"))


def cleared_meanwhile(machine):
    # The one that is cleared stops in a step until the other has ended.
    os.mkfifo(machine.base / "gate")
    first = machine.start("run", f"in_step=wait_for={machine.base / 'gate'}", "run", "forget", "run")
    machine.process("clear")
    assert not list(machine.cache.glob("*/fxgraph"))
    with open(machine.base / "gate", "w"):
        pass
    answer = machine.end(first)
    assert right(answer) and not answer["raised"], answer
    return machine.cache


def two_save(machine):
    both = [machine.start("run", "save=mine") for _ in range(2)]
    answers = [machine.end(pid) for pid in both]
    assert all(right(answer) and not answer["raised"] for answer in answers), answers
    shutil.rmtree(machine.folder)
    assert read(machine.process("load=mine.tckcache", "run")) and not machine.leftovers()


def two_read(machine):
    both = [machine.start("run", "run") for _ in range(2)]
    assert all(read(machine.end(pid)) for pid in both)


def clock_back(machine):
    shutil.rmtree(machine.folder)
    answer = machine.process(f"clock={-365 * DAY}", "run", "run")
    assert right(answer, 1) and right(answer, eager=True), answer
    machine.process("trim")
    machine.moment = "start"
    assert read(machine.process("run"))


def clock_back_sampling(machine):
    answer = machine.process("run", f"in_step=clock={-365 * DAY}", "run", "run")
    assert right(answer) and not answer["raised"], answer


def clock_back_file(machine):
    _date(machine.saved, 365 * DAY)
    shutil.rmtree(machine.folder)
    answer = machine.process("load=mine.tckcache", "run", "save=mine")
    assert read(answer) and not answer["raised"], answer


def clock_back_reading(machine):
    for file in machine.kit.rglob("*"):
        _date(file, 365 * DAY)
    answer = machine.process("run", "trim", "run")
    assert read(answer) and not answer["raised"], answer
    assert read(machine.process("run"))


def _date(file, seconds):
    os.utime(file, (time.time() + seconds,) * 2)
