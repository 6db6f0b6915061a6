"""The cache on disk: places, limits, who may write them, and what heals itself."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest.mock
import uuid
from pathlib import Path, PureWindowsPath

import pytest
import torch

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NAMES = ["0" * 12, "1" * 12, "2" * 12]
MIB = 1024**2


@pytest.fixture
def disk_cache(engine):
    return engine("cache.disk")


class Timer:
    """In place of threading.Timer: waits until the test has it ring."""

    def __init__(self, waiting, interval, function):
        self.waiting, self.interval, self.function, self.daemon = waiting, interval, function, False

    def start(self):
        self.waiting.append(self)


@pytest.fixture
def timers(monkeypatch):
    """Those that wait."""
    waiting = []
    monkeypatch.setattr(threading, "Timer", functools.partial(Timer, waiting))
    return waiting


def ring(timers):
    timers.pop(0).function()


@pytest.fixture
def cache(disk_cache, tmp_path, timers):
    return disk_cache.DiskCache(tmp_path / "cache", 2 * MIB)


@pytest.fixture
def three(cache):
    """Three folders of a MiB, used an hour, half an hour and 20 minutes ago."""
    for age, name in zip((3600, 1800, 1200), NAMES, strict=True):
        cache.enter(name, "Block")
        cache.exit(name)
        (cache.root / name / "fxgraph").mkdir()
        (cache.root / name / "fxgraph" / "entry").write_bytes(bytes(MIB))
        os.utime(cache.root / name / "about.json", (time.time() - age,) * 2)
    return cache


def names(cache):
    return {folder.name for folder in cache.folders()}


def variables():
    return {name: os.environ.get(name) for name in VARIABLES}


def test_the_variables_hold_while_a_kind_compiles_and_no_longer(cache):
    before = variables()
    cache.enter(NAMES[0], "Block")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.root / NAMES[0])
    cache.enter(NAMES[1], "Other")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.root / NAMES[1])
    cache.exit(NAMES[1])
    cache.exit(NAMES[0])
    assert variables() == before
    assert json.loads((cache.root / NAMES[1] / "about.json").read_text())["class"] == "Other"


def test_variables_that_were_not_set_are_not_set_afterwards(cache, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cache.enter(NAMES[0], "Block")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.root / NAMES[0] / "triton")
    cache.exit(NAMES[0])
    assert not any(name in os.environ for name in VARIABLES)


def test_a_triton_folder_of_the_user_stays(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    cache.enter(NAMES[0], "Block")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    cache.exit(NAMES[0])


def test_the_file_of_autotuned_choices_follows_the_folder(cache):
    from torch._inductor.codecache import CacheBase

    elsewhere = CacheBase.get_local_cache_path()
    cache.enter(NAMES[0], "Block")
    assert cache.root / NAMES[0] in CacheBase.get_local_cache_path().parents
    cache.exit(NAMES[0])
    assert CacheBase.get_local_cache_path() == elsewhere


def test_the_least_recently_used_folder_goes_first(three):
    three.limit += MIB // 2
    assert three.trim() >= MIB
    assert names(three) == {NAMES[1], NAMES[2]}
    assert three.size() <= three.limit
    assert three.trim() == 0


def test_use_keeps_a_folder(three):
    three.enter(NAMES[0], "Block")
    three.exit(NAMES[0])
    three.limit += MIB // 2
    three.trim()
    assert names(three) == {NAMES[0], NAMES[2]}


def test_nothing_goes_that_is_in_use(three):
    three.limit = 0
    three.enter(NAMES[0], "Block")
    os.utime(three.root / NAMES[0] / "about.json", (0, 0))
    os.utime(three.root / NAMES[1] / "about.json")  # another process
    three.trim()
    assert names(three) == {NAMES[0], NAMES[1]}
    three.clear()
    assert names(three) == {NAMES[0]}
    three.exit(NAMES[0])
    assert three.clear() >= MIB
    assert names(three) == set() and three.size() == 0


def test_clearing_leaves_other_files_alone(three):
    (three.root / "notes").mkdir()
    (three.root / "notes" / "mine.txt").write_text("mine")
    shutil.copytree(three.root / "notes", three.root / "deadbeefcafe")
    three.clear()
    assert names(three) == set()
    for name in ("notes", "deadbeefcafe"):
        assert (three.root / name / "mine.txt").read_text() == "mine"


def test_what_windows_holds_on_to_stays_known_and_goes_with_the_next(three, monkeypatch):
    """Code that is loaded cannot be removed there."""
    real, loaded = os.unlink, three.root / NAMES[0] / "ab" / "code.pyd"
    loaded.parent.mkdir()
    loaded.write_bytes(bytes(MIB))
    (three.root / NAMES[1] / "about.json").unlink()  # as former versions have left it

    def unlink(path, *given, **named):
        if str(path).endswith(".pyd"):
            raise PermissionError(13, "in use", str(path))
        real(path, *given, **named)

    with monkeypatch.context() as windows:
        windows.setattr(os, "unlink", unlink)
        assert {entry["name"] for entry in three.usage()["entries"]} == set(NAMES)
        assert three.clear() >= 2 * MIB
        (entry,) = three.usage()["entries"]
        assert (entry["name"], entry["class"]) == (NAMES[0], "Block") and entry["bytes"] > MIB
    assert three.clear() > MIB and not loaded.parent.parent.exists()


def test_usage_tells_what_lies_where(three):
    usage = three.usage()
    assert usage["folder"] == str(three.root) and usage["limit"] == 2 * MIB and usage["bytes"] > 3 * MIB
    assert [entry["name"] for entry in usage["entries"]] == NAMES[::-1]
    assert {entry["class"] for entry in usage["entries"]} == {"Block"}


@pytest.mark.parametrize(("given", "gib"), [("", 2), ("0.5", 0.5), ("0", 0), ("much", 2), ("-1", 2), ("inf", 2), ("nan", 2)])
def test_the_limit_can_be_set(disk_cache, monkeypatch, given, gib):
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE_GIB", given)
    assert disk_cache.limit_in_bytes() == int(gib * 1024**3)
    assert disk_cache.limit_in_bytes(7) == int((gib if given else 7) * 1024**3), "the variable goes before the setting"


def test_the_name_of_a_folder_depends_on_the_structure_alone(disk_cache):
    from support import Net

    structure = disk_cache.structure_of
    first, second = Net(count=2).blocks
    assert disk_cache.folder_name("Block", structure(first)) == disk_cache.folder_name("Block", structure(second))
    others = [
        disk_cache.folder_name("Other", structure(first)),
        disk_cache.folder_name("Block", structure(Net(width=16).blocks[0])),
    ]
    assert len({*others, disk_cache.folder_name("Block", structure(first))}) == 3


def test_a_choice_is_recalled(cache):
    net = torch.nn.Linear(2, 2)
    assert cache.recall(net, "attention") is None
    cache.remember(net, "attention", "cudnn")
    assert cache.recall(torch.nn.Linear(2, 2), "attention") == "cudnn"
    assert cache.recall(torch.nn.Linear(2, 3), "attention") is None


def test_it_knows_whether_this_machine_has_compiled_as_it_is_now(engine, cache, monkeypatch):
    disk = engine("cache.disk")
    assert not cache.has_current()
    cache.enter(NAMES[0], "Block")
    cache.exit(NAMES[0])
    assert cache.has_current()
    another = {**disk.environment(), "torch": "9.9"}
    monkeypatch.setattr(disk, "environment", lambda: another)
    assert not cache.has_current()


ELF = b"\x7fELF" + bytes(60)


def filled(cache, name=NAMES[0], age=3600.0, **files):
    """A kind's folder with files of that age, as an earlier process has left it."""
    cache.enter(name, "Block")
    cache.exit(name)
    for path, content in files.items():
        file = cache.root / name / "ab" / path.replace("_", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        os.utime(file, (time.time() - age,) * 2)
    return cache.root / name


@pytest.fixture
def restarted(disk_cache, cache):
    """The same cache in a process that has not used it yet."""
    return lambda: disk_cache.DiskCache(cache.root, cache.limit)


@pytest.mark.parametrize("damaged", [{"a_so": b""}, {"a_so": bytes(64)}, {"a_cubin": b""}, {"a_json": b""}, {"a_py": b""}])
def test_a_folder_with_empty_files_is_compiled_anew(cache, disk_cache, restarted, damaged, caplog):
    net = torch.nn.Linear(2, 2)
    name = disk_cache.folder_of(net)
    folder = filled(cache, name, whole_so=ELF, **damaged)
    cache.remember(net, "attention", "cudnn")
    after = restarted()
    after.enter(name, "Linear")
    after.exit(name)
    assert sorted(entry.name for entry in folder.iterdir()) == ["about.json", "choices.json"]
    assert after.recall(net, "attention") == "cudnn"
    assert str(folder) in caplog.text and "compiled anew" in caplog.text


@pytest.mark.parametrize("whole", [{"a_so": ELF}, {"a_lock": b""}, {"a_best_config": b""}, {"a": b""}])
def test_a_folder_with_whole_files_is_left_alone(cache, restarted, whole):
    folder = filled(cache, **whole)
    after = restarted()
    after.enter(NAMES[0], "Block")
    after.exit(NAMES[0])
    assert (folder / "ab").exists()


def test_a_file_that_another_process_may_be_writing_is_left_alone(cache, restarted):
    folder = filled(cache, age=0.0, a_so=b"")
    after = restarted()
    after.enter(NAMES[0], "Block")
    after.exit(NAMES[0])
    assert (folder / "ab" / "a.so").exists()


@pytest.mark.parametrize("fails", ["environment", "folder_scope"])
def test_a_folder_that_could_not_be_entered_is_not_in_use(cache, disk_cache, monkeypatch, fails):
    """Else it would never be removed, and PyTorch would go on writing into it."""
    variables = dict(os.environ)
    with monkeypatch.context() as broken:
        if fails == "environment":
            broken.setattr(disk_cache, "environment", lambda: fail(RuntimeError("no device")))
        else:
            switches, errors = disk_cache.folder_scope._switches, [RuntimeError("no room")]
            read, write = switches["triton_folder"]
            broken.setitem(switches, "triton_folder", (read, lambda value: fail(errors.pop()) if errors else write(value)))
        with pytest.raises(RuntimeError):
            cache.enter(NAMES[0], "Block")
    assert not cache._compiling and dict(os.environ) == variables
    with pytest.raises(KeyError):
        cache.exit(NAMES[0])


def test_an_empty_description_is_written_anew(cache, restarted):
    folder = filled(cache, a_so=ELF)
    (folder / "about.json").write_text("")
    after = restarted()
    assert not after.has_current()
    after.enter(NAMES[0], "Block")
    after.exit(NAMES[0])
    assert after.has_current() and (folder / "ab").exists()


def raised(action):
    """The error as the backend's caller gets it."""
    try:
        try:
            action()
        except Exception as error:
            raise RuntimeError("backend='inductor' raised") from error
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


def fail(error):
    raise error


def load_library(file):
    import ctypes

    return lambda: ctypes.CDLL(str(file))


def load_module(file):
    return lambda: exec(compile(file.read_text(), str(file), "exec"), {})  # noqa: S102  as PyTorch loads them


def test_what_cannot_be_loaded_is_compiled_once_more(cache, caplog):
    folder = filled(cache, a_so=ELF[:20])
    error = raised(load_library(folder / "ab" / "a.so"))
    cache.enter(NAMES[0], "Block")  # as during the call that failed
    assert cache.drop_if_corrupt(NAMES[0], error)
    assert not (folder / "ab").exists() and str(folder) in caplog.text
    assert not cache.drop_if_corrupt(NAMES[0], error), "what fails again has another cause"
    cache.exit(NAMES[0])


def test_an_extension_that_is_cut_off_is_compiled_once_more(cache):
    """On Windows the text of the error names no file."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    folder = filled(cache, a_so=ELF[:20])
    file = folder / "ab" / ("a.pyd" if os.name == "nt" else "a.so")
    (folder / "ab" / "a.so").rename(file)
    spec = spec_from_file_location("a", file, loader=ExtensionFileLoader("a", str(file)))
    assert cache.drop_if_corrupt(NAMES[0], raised(lambda: module_from_spec(spec)))


def test_what_windows_says_of_an_extension_that_is_cut_off_is_enough(cache):
    folder = filled(cache, a_so=ELF)
    said = "DLL load failed while importing a: %1 is not a valid Win32 application."
    assert cache.drop_if_corrupt(NAMES[0], ImportError(said, name="a", path=str(folder / "ab" / "a.pyd")))


@pytest.mark.parametrize("source", ["import json.no_such_module", "json.dum", "def f(:"])
def test_a_module_that_is_cut_off_is_compiled_once_more(cache, source):
    folder = filled(cache, a_py=source.encode())
    assert cache.drop_if_corrupt(NAMES[0], raised(load_module(folder / "ab" / "a.py")))


def test_a_pickle_that_is_cut_off_is_compiled_once_more(cache):
    import pickle

    filled(cache, a_so=ELF)
    assert cache.drop_if_corrupt(NAMES[0], raised(lambda: pickle.loads(pickle.dumps([1, 2, 3])[:-2])))


def test_an_empty_file_is_reason_enough(cache):
    """A cubin: the driver's error names no file."""
    filled(cache, a_cubin=b"")
    assert cache.drop_if_corrupt(NAMES[0], RuntimeError("Triton Error [CUDA]: device kernel image is invalid"))


def test_kernels_for_a_gpu_that_was_exchanged_are_compiled_once_more(cache):
    """The second of two: folders are named after the first."""
    folder = filled(cache, a_cubin=ELF)
    message = "Triton Error [CUDA]: no kernel image is available for execution on the device"
    assert cache.drop_if_corrupt(NAMES[0], raised(functools.partial(fail, RuntimeError(message))))
    assert not (folder / "ab").exists()
    assert not cache.drop_if_corrupt(NAMES[0], RuntimeError(message)), "PyTorch itself is not made for this GPU"


def test_a_folder_that_is_gone_is_as_good_as_emptied(cache):
    """The user has removed it: what is compiled anew has a new one."""
    assert cache.drop_if_corrupt(NAMES[0], ImportError(f"{cache.root / NAMES[0] / 'a.so'}: file too short"))


def test_other_errors_leave_the_folder_alone(cache, engine):
    from torch._inductor.exc import CppCompileError

    folder = filled(cache, a_so=ELF, a_cpp=b"int x;", a_py=b"def f():\n    raise ValueError('in use')\n")
    (folder / "ab" / "c.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1 / 0'], check=True)\n")
    no_program = folder.parent / "cl.exe"
    no_program.write_text("this is no program")
    no_program.chmod(0o755)
    used = {}
    exec(compile((folder / "ab" / "a.py").read_text(), str(folder / "ab" / "a.py"), "exec"), used)  # noqa: S102
    for error in (
        raised(lambda: 1 / 0),
        raised(used["f"]),
        CppCompileError(["g++", f"{folder}/ab/a.cpp"], f"{folder}/ab/a.cpp: error: no such header"),
        OSError(28, "No space left on device", f"{folder}/ab/a.so"),
        raised(load_library("/nowhere/libgomp.so.1")),
        # The compiler is run by the module that inductor has written, and fails.
        raised(load_module(folder / "ab" / "c.py")),
        raised(lambda: subprocess.run([str(no_program)], check=True)),
    ):
        assert not cache.drop_if_corrupt(NAMES[0], error), error
    assert (folder / "ab" / "a.so").exists()


def test_the_size_is_looked_at_again_after_compilations(three, timers):
    three.limit += 2 * MIB
    ring(timers)  # the fixture's
    assert not timers and names(three) == set(NAMES)
    three.limit -= 3 * MIB // 2
    three.enter(NAMES[2], "Block")
    assert not timers, "not while something is compiled"
    three.exit(NAMES[2])
    assert [(timer.interval, timer.daemon) for timer in timers] == [(60, True)]
    ring(timers)
    assert names(three) == {NAMES[1], NAMES[2]} and not timers


def test_one_look_serves_all_compilations_until_then(three, timers):
    for name in NAMES:
        three.enter(name, "Block")
        three.exit(name)
    assert len(timers) == 1
    ring(timers)
    assert names(three) == set(NAMES) and [timer.interval for timer in timers] == [600], "in use: they are looked at later"


def test_a_look_that_failed_is_not_the_last(three, timers, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr(three, "trim", lambda: (_ for _ in ()).throw(FileNotFoundError("another server was faster")))
        ring(timers)
    assert not timers
    three.enter(NAMES[2], "Block")
    three.exit(NAMES[2])
    assert len(timers) == 1


@pytest.mark.parametrize("walks", ["trim", "clear", "_look"])
def test_a_block_is_lowered_while_the_folders_are_walked(three, disk_cache, monkeypatch, walks):
    """On a network volume or a hard disk that takes a minute."""
    entered, size_of = [], disk_cache.size_of

    def compile_block():
        three.enter("f" * 12, "Block")
        three.exit("f" * 12)
        entered.append(True)

    def walk(folder):
        entered.clear()
        thread = threading.Thread(target=compile_block, daemon=True)
        thread.start()
        thread.join(10)
        assert entered
        return size_of(folder)

    monkeypatch.setattr(disk_cache, "size_of", walk)
    getattr(three, walks)()


def test_what_begins_to_compile_while_the_folders_are_walked_stays(three, disk_cache, monkeypatch):
    three.limit, size_of = 0, disk_cache.size_of

    def walk(folder):
        if not three._compiling:
            three.enter(NAMES[0], "Block")
            os.utime(three.root / NAMES[0] / "about.json", (0, 0))
        return size_of(folder)

    monkeypatch.setattr(disk_cache, "size_of", walk)
    three.trim()
    assert names(three) == {NAMES[0]}
    three.exit(NAMES[0])


def test_folders_dated_in_the_future_go_first(three):
    os.utime(three.root / NAMES[2] / "about.json", (time.time() + 10**8,) * 2)
    three.limit += MIB // 2
    three.trim()
    assert names(three) == {NAMES[0], NAMES[1]}


def test_what_killed_processes_leave_goes_after_an_hour(cache, tmp_path):
    folder = filled(cache, a_so=ELF)
    old = [
        tmp_path / "torch-compile-kit-a1_b2c3d.partial", folder / "ab" / ".12.34.tmp", folder / "x.tmp",
        folder / "triton" / "tmp.pid_1_2" / "k.cubin", folder / "triton" / "0" / f"tmp.{uuid.uuid4()}" / "k.cubin",
        cache.root / "incoming-a1_b2c3d" / "entry",
    ]  # fmt: skip
    young = [
        tmp_path / "torch-compile-kit-young234.partial", folder / "ab" / ".56.78.tmp",
        cache.root / "incoming-young234" / "entry",
    ]  # fmt: skip
    others = [
        tmp_path / "mine.partial", tmp_path / "mine.tmp", folder / "ab" / "a.so", cache.root / "notes" / "mine.tmp",
        cache.root / "notes.tmp", cache.root / "incoming-photos" / "1.jpg", tmp_path / "torch-compile-kit-mine.partial",
    ]  # fmt: skip
    for file in old + young + others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("left")
    for file in old + others:
        os.utime(file, (0, 0))
        os.utime(file.parent, (0, 0)) if file.parent.name.startswith(("incoming", "tmp.")) else None
    os.utime(young[-1].parent)
    cache.trim()
    assert [file for file in old if file.exists()] == []
    assert [file for file in young + others if not file.exists()] == []


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")


@posix
def test_folders_of_code_are_this_users_alone(cache):
    before = os.umask(0)
    try:
        filled(cache)
    finally:
        os.umask(before)
    assert [(path.stat().st_mode & 0o777) for path in (cache.root / NAMES[0],)] == [0o700]


@pytest.fixture
def opened(disk_cache, engine, monkeypatch, tmp_path, timers):
    """open_cache as in a process that has opened none; the cache it gives."""

    def opened(folder=tmp_path / "kit" / "cache"):
        monkeypatch.setattr(disk_cache._Current, "opened", False)
        monkeypatch.setattr(disk_cache._Current, "cache", None)
        return disk_cache.open_cache(folder)

    monkeypatch.setattr(engine("cache.folders"), "_private_group", lambda: None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return opened


def test_a_cache_that_is_open_is_found_while_another_thread_walks_its_folders(opened, disk_cache, tmp_path):
    """`trim` and `clear` hold the lock meanwhile; the server's event loop asks."""
    cache, found = opened(), []
    asks = threading.Thread(target=lambda: found.append(disk_cache.open_cache(tmp_path)), daemon=True)
    with disk_cache._lock:
        asks.start()
        asks.join(5)
        assert found == [cache]


def test_a_cache_that_was_opened_is_trimmed_a_minute_later(opened, timers):
    """Not before: while this process prepares to compile, nothing is traced."""
    cache = opened()
    assert [timer.interval for timer in timers] == [60]
    filled(cache)
    cache.limit = 0
    os.utime(cache.root / NAMES[0] / "about.json", (0, 0))
    ring(timers)
    assert names(cache) == set()


def modes(*paths):
    return [path.stat().st_mode & 0o777 for path in paths]


@posix
def test_a_new_cache_is_private_also_after_its_folders_were_removed(opened):
    before = os.umask(0o002)  # Ubuntu's default
    try:
        cache = opened()
        assert modes(cache.root, cache.root.parent) == [0o700, 0o700]
        shutil.rmtree(cache.root.parent)
        filled(cache)
        assert modes(cache.root, cache.root.parent, cache.root / NAMES[0]) == [0o700, 0o700, 0o700]
    finally:
        os.umask(before)
    assert opened().root == cache.root


@posix
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
@pytest.mark.parametrize("folder", ["kit", "kit/cache"])
def test_a_folder_that_others_could_write_is_closed_and_nothing_in_it_is_used(opened, tmp_path, caplog, folder, mode):
    """They could put code, or another folder, in its place."""
    cache = filled(opened()).parent
    (cache / NAMES[0] / "graph").write_bytes(bytes(3 * MIB))
    (cache / "mine.txt").write_text("where the user has linked the cache to")
    (tmp_path / folder).chmod(mode)
    assert opened().root == tmp_path / "kit" / "cache" == cache
    assert modes(tmp_path / folder) == [0o700] and [file.name for file in cache.iterdir()] == ["mine.txt"]
    assert f"others could write into {tmp_path / folder} " in caplog.text
    assert f"removed from {cache}, since others could have written it: 1 entries, 3.0 MiB" in caplog.text
    assert "set TORCH_COMPILE_KIT_CACHE to another folder" in caplog.text
    caplog.clear()
    (tmp_path / folder).chmod(mode)
    assert opened() and "removed from" not in caplog.text, "there was no code"


@pytest.fixture
def no_rights(monkeypatch, tmp_path):
    """A drive on which each folder may be written by all, whatever it is made with."""
    made, closed = Path.mkdir, Path.chmod

    def mkdir(self, *given, **named):
        made(self, *given, **named)
        if tmp_path / "kit" in (self, *self.parents):
            closed(self, 0o777)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)


@posix
def test_on_a_drive_without_rights_a_private_folder_elsewhere_is_used_and_said_once(opened, tmp_path, caplog, no_rights):
    for _start in range(2):
        caplog.clear()
        cache = opened()
        assert cache.root == tmp_path / "home" / ".cache" / "torch-compile-kit" / "cache"
        assert modes(cache.root, cache.root.parent) == [0o700, 0o700]
        (said,) = caplog.messages
        assert f"{tmp_path / 'kit' / 'cache'} cannot be used: others may write into {tmp_path / 'kit'} " in said
        assert f"goes to {cache.root}; TORCH_COMPILE_KIT_CACHE" in said
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("no folder can be made here")
    assert opened().root == tmp_path / "tmp" / f"torch-compile-kit-{os.geteuid()}" / "cache"


@posix
def test_a_user_without_a_name_and_home_has_a_cache_too(opened, tmp_path, monkeypatch):
    """As in a container that is started with any number for its user."""
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unittest.mock.Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert opened().root == tmp_path / "inductor" / "torch-compile-kit"
    (tmp_path / "inductor" / "torch-compile-kit").rmdir()
    (tmp_path / "inductor" / "torch-compile-kit").write_text("no folder can be made here")
    assert opened().root == tmp_path / "tmp" / f"torch-compile-kit-{os.geteuid()}" / "cache"


@posix
@pytest.mark.parametrize("named", [False, True], ids=["the host's", "named"])
@pytest.mark.parametrize("name, used", [("plain", True), ("gr\u00fcn", True), ("AI stuff", False), ("Ann's", False)])
def test_a_folder_whose_path_a_c_compiler_would_split_is_not_used(opened, tmp_path, monkeypatch, caplog, name, used, named):
    """No graph that has C++ in it could be compiled there: on a CPU none."""
    folder = tmp_path / name / "cache"
    if named:
        monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(folder.parent))
        folder = folder.with_name("torch-compile-kit")
    assert opened(folder).root == (folder if used else tmp_path / "home" / ".cache" / "torch-compile-kit" / "cache")
    assert used != (f"{folder} has a space or a quote in it, where C++ compilers split paths" in caplog.text)


def test_a_folder_whose_path_would_be_split_is_the_last_resort(opened, tmp_path, monkeypatch):
    """A GPU's code compiles there."""
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "it's"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "it's"))
    assert opened(tmp_path / "it's mine" / "cache").root.parent.parent.samefile(tmp_path)


@pytest.mark.skipif(os.name != "nt", reason="only Windows has short names")
def test_on_windows_a_folder_with_a_space_is_used_by_its_short_name(opened, tmp_path, caplog):
    (tmp_path / "Jane Doe").mkdir()
    root = opened(tmp_path / "Jane Doe" / "user" / "cache").root
    assert root.samefile(tmp_path / "Jane Doe" / "user" / "cache") and " " not in str(root) and not caplog.text


@pytest.mark.parametrize(
    "path, is_split", [(r"C:\Users\Jane Doe", True), (r"C:\Users\O'Brien", True), (r"C:\Users\jane", False)]
)
def test_a_path_of_windows_is_split_too(engine, path, is_split):
    assert engine("cache.folders").is_split(PureWindowsPath(path)) is is_split


def test_the_folder_that_the_user_names_goes_first(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert opened().root == tmp_path / "inductor" / "torch-compile-kit"
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path / "volume"))
    assert opened().root == tmp_path / "volume" / "torch-compile-kit"
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path / "volume" / "torch-compile-kit"))
    assert opened().root == tmp_path / "volume" / "torch-compile-kit", "it is named already"


def test_a_folder_of_the_users_home(opened, tmp_path, monkeypatch):
    """No shell expands what a Dockerfile or a service sets. A folder named `~` was made, which `rm -r ~` does not remove."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", "~/volume")
    assert opened().root == tmp_path / "volume" / "torch-compile-kit"


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_KIT_CACHE", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_else_is_in_the_folder_that_the_user_names_is_left_alone(opened, tmp_path, monkeypatch, variable):
    """As /workspace of a pod, which holds everything."""
    volume = tmp_path / "volume"
    theirs = [
        volume / name for name in ("incoming-20260101/1.jpg", "notes.tmp", "deadbeefcafe/1.txt", "deadbeefcafe/fxgraph/1")
    ]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for path in (*theirs, *(file.parent for file in theirs[::2])):
        os.utime(path, (0, 0))
    volume.chmod(0o777)
    mode = volume.stat().st_mode
    monkeypatch.setenv(variable, str(volume))
    cache = opened()
    filled(cache)
    cache.trim()
    assert cache.clear() > 0
    assert all(file.exists() for file in theirs) and volume.stat().st_mode == mode


@posix
def test_a_named_folder_on_a_drive_without_rights_is_not_used_and_what_can_be_done_is_said(
    opened, tmp_path, monkeypatch, caplog, no_rights
):
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path / "kit" / "volume"))
    assert opened().root == tmp_path / "home" / ".cache" / "torch-compile-kit" / "cache"
    assert f"others may write into {tmp_path / 'kit' / 'volume'}" in caplog.text and "docs/fleet.md" in caplog.text


@posix
def test_a_folder_of_another_user_is_not_used(opened, tmp_path, caplog, monkeypatch):
    (tmp_path / "kit" / "cache").mkdir(parents=True, mode=0o700)
    (tmp_path / "kit").chmod(0o700)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert opened() is None, "what is made here is that user's, too"
    assert f"belongs to another user (uid {real}, this is {real + 1})" in caplog.text


@posix
def test_a_kinds_folder_that_others_could_write_is_closed_and_emptied(cache, caplog):
    folder = filled(cache)
    (folder / "theirs.py").write_text("code")
    folder.chmod(0o777)
    cache.enter(NAMES[0], "Block")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    cache.exit(NAMES[0])
    assert modes(folder) == [0o700] and [file.name for file in folder.iterdir()] == ["about.json"]
    assert f"others could write into {folder} " in caplog.text


@pytest.fixture
def depends(engine):
    """What the disk cache depends on, without what other tests have it remember."""
    found = engine("cache.environment")
    yield found
    found.environment.cache_clear()


def test_code_of_ours_that_decides_what_is_compiled_is_part_of_the_key(depends, monkeypatch, tmp_path):
    engine_folder = Path(depends.__file__).parent.parent
    for pattern in depends.SOURCES:
        assert list(engine_folder.glob(pattern)), f"{pattern} is nothing: the digest would never change"
    names = {file.name for pattern in depends.SOURCES for file in engine_folder.glob(pattern)}
    assert {"backend.py", "rotary_norms.py", "persistent_reductions.py", "attention_kernels.py"} <= names
    shutil.copytree(engine_folder, tmp_path / "engine")
    monkeypatch.setattr(depends, "__file__", str(tmp_path / "engine" / "cache" / "environment.py"))
    seen = {depends.version_of_pack()}
    for name in ("inductor/backend.py", "inductor/rotary_norms.py"):
        with (tmp_path / "engine" / name).open("a") as file:
            file.write("# changed\n")
        seen.add(depends.version_of_pack())
    assert len(seen) == 3


def test_code_that_is_updated_while_the_server_runs_changes_nothing_until_the_restart(engine, tmp_path):
    """Else graphs of the code that runs would be stored under the new version, and used after the restart."""
    shutil.copytree(Path(engine("cache.environment").__file__).parent.parent, tmp_path / "kit" / "engine")
    code = """
from pathlib import Path
from kit.engine.cache import environment
with Path("kit/engine/inductor/backend.py").open("a") as file:
    file.write("# an update")
print(environment.environment()["code of the pack"] != environment.version_of_pack())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    "key", ["torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen", "code of the pack"]
)
def test_each_of_what_it_depends_on_gives_folders_of_their_own(key, depends, engine, monkeypatch):
    disk, known = engine("cache.disk"), dict(depends.environment())
    assert known[key]
    structure = ((), ("x", (2, 2), "torch.float32"))
    before = disk.folder_name("Block", structure)
    monkeypatch.setattr(disk, "environment", lambda: {**known, key: "another"})
    assert disk.folder_name("Block", structure) != before


def test_the_version_of_the_hosts_kernels_is_known(depends):
    assert re.match(r"\d+\.\d+", depends.environment()["comfy-kitchen"])


def test_sizes_that_are_asked_for_again_and_again_are_found_once(three, disk_cache, monkeypatch):
    walked = []
    monkeypatch.setattr(disk_cache, "size_of", lambda folder: walked.append(folder.name) or 1)
    assert three.usage() == three.usage() and sorted(walked) == NAMES
    passed = time.monotonic() + disk_cache.USAGE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: passed)
    three.usage()
    assert len(walked) == 2 * len(NAMES)
    three.limit = 7
    assert three.usage()["limit"] == 7
    three.clear()
    assert three.usage()["entries"] == []
