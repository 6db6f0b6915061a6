"""The faults that need processes of their own; see `table.THERE` and `process.py`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OTHER = "0" * 64  # the entry of another model's code
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
        self.store = self.kit / "store"
        if warm is not None:
            shutil.copytree(warm.base / "user", base / "user")
        for folder in (self.kit, self.store):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        self.others = {
            self.store / f"{OTHER}.code": b"code of another model",
            self.store / f"{OTHER[:12]}.json": b'{"attention": "of another model"}',
            self.kit / "other.tckcache": b"a file of the user's",
        }
        for file, content in self.others.items():
            file.write_bytes(content)

    @property
    def saved(self):
        return self.kit / "mine.tckcache"

    @property
    def entry(self):
        """Of the code that the runs of these rows need."""
        (entry,) = self.entries
        return entry

    @property
    def entries(self):
        return [file for file in self.store.glob("*.code") if file.stem != OTHER]

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
        return [f for f in self.kit.rglob("*") if f.suffix == ".tmp"]


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


def not_saved(answer):
    """The node says so, and the prompt goes on."""
    return not answer["raised"] and answer["saved"].startswith("Not saved: ") and "cannot be written" in answer["saved"]


def next_process(machine):
    """In the background the first run is eager, whatever is on the disk."""
    answer = machine.process("run", "run")
    assert not answer["raised"], answer
    return right(answer, *([1] if machine.moment == "background" else [0, 1])) and right(answer, eager=True)


# Rows of the table


def cannot_save(machine):
    before = machine.saved.read_bytes()
    assert not_saved(machine.process("run", "fail=engine.cache.archive.write_whole:io", "save=mine"))
    assert machine.saved.read_bytes() == before and not machine.leftovers()
    right(machine.process("run", "save=mine"))


def reset_meanwhile(machine):
    answer = machine.process("reset", *["run", "forget"] * 4, "run")
    assert answer["resets"] >= 4, answer
    right(answer, eager=True)


def no_memory_to_load(machine):
    machine.entry.unlink()
    answer = machine.process("fail=engine.cache.archive._parsed:memory", "load=mine.tckcache")
    assert refused(answer, "load=mine.tckcache", error="MemoryError") and not machine.leftovers()
    assert read(machine.process("load=mine.tckcache", "run"))


def cut_entry(machine):
    os.truncate(machine.entry, machine.entry.stat().st_size // 2)
    compiled_anew(machine)


def compiled_anew(machine):
    """A damaged entry is said, and replaced."""
    answer = machine.process("run", "run")
    assert right(answer) and not answer["runs"][0]["from_disk"] and "is damaged" in str(answer["said"]), answer
    assert read(machine.process("run"))


def flipped_file(machine):
    content = bytearray(machine.saved.read_bytes())
    content[len(content) // 2] ^= 1
    machine.saved.write_bytes(content)
    machine.entry.unlink()
    answer = machine.process("load=mine.tckcache", "run")
    assert "damaged" in answer["loaded"] and not answer["raised"] and not machine.leftovers(), answer
    assert right(answer) and not answer["runs"][0]["from_disk"], answer


def vanished_cache(machine):
    answer = machine.process("run", "vanish", "run", "forget", "run")
    assert right(answer) and not answer["raised"], answer
    return machine.store


def half_entry(machine):
    machine.entry.unlink()
    answer = machine.process("spoil", "run", "run")
    assert answer.get("spoiled") == machine.entry.name, answer
    assert right(answer, 1) and right(answer, eager=machine.moment == "background"), answer
    machine.moment = "start"
    compiled_anew(machine)


def unreadable_entry(machine):
    answer = machine.process("fail=engine.cache.code_store.read_whole:io", "run", "run")
    assert right(answer) and not answer["runs"][0]["from_disk"], answer
    assert read(machine.process("run"))


def no_memory_to_read(machine):
    answer = machine.process("fail=engine.compile.traced_graph.load:memory", "run")
    assert right(answer, eager=True) and not answer["raised"] and "too little memory" in str(answer["said"]), answer
    assert read(machine.process("run"))


def cancelled_saving(machine):
    answer = machine.process("run", "cancel", "save=mine", "run", "run")
    assert refused(answer, "run", error="InterruptProcessingException") and right(answer) and len(answer["runs"]) == 2, answer
    machine.entry.unlink()
    assert read(machine.process("load=mine.tckcache", "run")) and not machine.leftovers()


def full_disk_sampling(machine):
    answer = machine.process("run", "in_step=limit=0", "run", "unlimit", "run")
    assert right(answer) and not answer["raised"], answer


def blocked_cache(machine):
    answer = machine.process("run", "in_step=block", "run", "run")
    assert right(answer) and not answer["raised"], answer
    machine.store.unlink()
    machine.store.with_name("kept").rename(machine.store)
    assert read(machine.process("run"))


def full_disk(machine):
    answer = machine.process("limit", "run", "run", "unlimit", "run", "run", "run")
    assert right(answer, -1) and right(answer, eager=True), answer
    shown = str(answer["said"])
    assert "cannot be used" in shown or "could not be compiled" in shown, shown


def full_disk_saving(machine):
    before = machine.saved.read_bytes()
    answer = machine.process("run", "limit", "save=mine")
    assert not_saved(answer) and machine.saved.read_bytes() == before
    assert not machine.leftovers() and right(answer)


def full_disk_loading(machine):
    machine.entry.unlink()
    answer = machine.process("limit", "load=mine.tckcache")
    assert "cannot be written" in answer["loaded"] and not answer["raised"] and not machine.leftovers(), answer
    assert read(machine.process("load=mine.tckcache", "run"))


def full_disk_reading(machine):
    """On the CPU, the libraries of the code need room."""
    before = machine.entry.read_bytes()
    answer = machine.process("limit=0", "run", "unlimit", "forget", "run")
    assert right(answer, 1) and right(answer, eager=True) and answer["runs"][1]["from_disk"], answer
    assert machine.entry.read_bytes() == before
    assert read(machine.process("run"))


def killed_compiling(machine):
    answer = machine.killed("kill=compiling", "run")
    assert not machine.entries
    end = time.monotonic() + 30
    while Path(f"/proc/{answer['compile process']}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end, "the compile process is left"
    next_process(machine)


def killed_sampling(machine):
    machine.killed("run", "in_step=kill", "run")
    assert read(machine.process("run"))


def killed_saving(machine):
    before = machine.saved.read_bytes()
    machine.killed("run", "kill=engine.files.replace", "save=mine")
    assert machine.saved.read_bytes() == before
    _later(machine)
    assert right(machine.process("run", "save=mine")) and not machine.leftovers()
    assert machine.saved.read_bytes() != before or machine.saved.stat().st_size == len(before)


def killed_loading(machine):
    machine.entry.unlink()
    machine.killed("kill=engine.files.replace", "load=mine.tckcache")
    assert not machine.entries
    _later(machine)
    answer = machine.process("load=mine.tckcache", "run", "trim")
    assert read(answer) and not answer["raised"] and not machine.leftovers(), answer


def killed_reading(machine):
    machine.killed("kill=engine.compile.traced_graph.load", "run")
    assert read(machine.process("run"))


def _later(machine):
    """More than an hour has gone by since the kill."""
    found = machine.leftovers()
    assert found
    for file in found:
        os.utime(file, (time.time() - 2 * HOUR,) * 2)


def read_only_entry(machine):
    """A folder in the place of the entry stops the administrator, too."""
    entry = machine.entry
    entry.unlink()
    entry.mkdir()
    answer = machine.process("run", "run")
    assert right(answer, 1) and right(answer, eager=True) and "is not kept" in str(answer["said"]), answer
    entry.rmdir()
    next_process(machine)


def read_only_saving(machine):
    machine.saved.unlink()
    machine.saved.mkdir()  # cannot be replaced by a file
    answer = machine.process("run", "save=mine")
    assert not_saved(answer) and not machine.leftovers()
    assert right(answer)


def read_only_cache(machine):
    kept = machine.store.rename(machine.kit / "kept")
    machine.store.write_text("not a folder")
    answer = machine.process("run", "run")
    said = next(line for line in answer["said"] if "cannot be used" in line)
    assert right(answer) and str(machine.store) in said, answer
    assert len(list((machine.base / "home" / ".cache" / "torch-compile-kit" / "store").glob("*.code"))) == 1
    machine.store.unlink()
    kept.rename(machine.store)
    assert read(machine.process("run"))


def two_compile(machine):
    machine.entry.unlink()
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
    assert not list(machine.store.glob("*.code"))
    with open(machine.base / "gate", "w"):
        pass
    answer = machine.end(first)
    assert right(answer) and not answer["raised"], answer
    return machine.store


def two_save(machine):
    both = [machine.start("run", "save=mine") for _ in range(2)]
    answers = [machine.end(pid) for pid in both]
    assert all(right(answer) and not answer["raised"] for answer in answers), answers
    machine.entry.unlink()
    answer = machine.process("load=mine.tckcache", "run")
    assert read(answer) and not machine.leftovers()
    assert all(word in answer["loaded"] for word in (machine.saved.name, "Flux")), answer["loaded"]
    assert {file.suffix for file in machine.store.iterdir()} == {".code", ".json", ".key"}


def two_read(machine):
    both = [machine.start("run", "run") for _ in range(2)]
    assert all(read(machine.end(pid)) for pid in both)


def clock_back(machine):
    machine.entry.unlink()
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
    machine.entry.unlink()
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
