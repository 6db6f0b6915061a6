"""The store of compiled code: who may have written an entry, what goes first, and where the store is."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NAMES = ["a" * 64, "b" * 64, "c" * 64]
STRUCTURE = "5" * 12
MIB = 1024**2
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")


@pytest.fixture
def stores(engine, monkeypatch):
    monkeypatch.setattr(engine("cache.shared")._Configured, "cache", None)
    return engine("cache.code_store")


@pytest.fixture
def store(stores, tmp_path):
    (tmp_path / "store").mkdir()
    return stores.CodeStore(tmp_path / "store", 2 * MIB, b"k" * 32)


def age(store, name, seconds):
    os.utime(store._file(name), (time.time() - seconds,) * 2)


@pytest.fixture
def three(store):
    """Three entries of half a MiB, used an hour, half an hour and 20 minutes ago."""
    for name, seconds in zip(NAMES, (3600, 1800, 1200), strict=True):
        store.put(name, bytes(MIB // 2))
        age(store, name, seconds)
    return store


# Who may have written an entry.


def test_an_entry_that_others_could_have_written_is_a_miss_and_goes(stores, store, caplog):
    assert store.get(NAMES[0]) is None
    store.put(NAMES[0], b"content")
    file = store._file(NAMES[0])
    good = file.read_bytes()
    for bad in (good[:-1], b"", b"content" * 10):
        file.write_bytes(bad)
        assert store.get(NAMES[0]) is None and not file.exists()
    assert f"{file} is damaged, or was not written by this user" in caplog.text
    store._file(NAMES[1]).write_bytes(good)
    assert store.get(NAMES[1]) is None, "of another name"
    file.write_bytes(good)
    assert store.get(NAMES[0]) == b"content"
    assert stores.CodeStore(store.folder, MIB, b"l" * 32).get(NAMES[0]) is None, "of another key"


def test_an_entry_can_be_read_where_nothing_can_be_written(store, monkeypatch):
    """On a volume that is mounted read-only."""
    store.put(NAMES[0], b"content")
    monkeypatch.setattr(os, "utime", unittest.mock.Mock(side_effect=OSError(30, "Read-only file system")))
    assert store.get(NAMES[0]) == b"content"


def test_what_cannot_be_written_is_said_once(store, caplog):
    shutil.rmtree(store.folder)
    for name in NAMES:
        store.put(name, b"content")
        store.remember(STRUCTURE, {"attention": "cudnn"})
    assert store.get(NAMES[0]) is None and caplog.text.count(f"is not kept in {store.folder}") == 1


def failing_below(folder, function):
    def call(path=".", *args, **options):
        if str(path).startswith(str(folder)):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return function(path, *args, **options)

    return call


def test_a_volume_that_is_gone_costs_no_code_that_is_already_made(store, monkeypatch, caplog):
    with monkeypatch.context() as gone:
        for function in ("stat", "scandir", "open"):
            gone.setattr(os, function, failing_below(store.folder, getattr(os, function)))
        gone.setattr("io.open", failing_below(store.folder, open))
        assert not store.put(NAMES[0], b"content") and store.get(NAMES[0]) is None and not store.has(NAMES[0])
        store.remember(STRUCTURE, {"attention": "cudnn"})
        assert not store.choices(STRUCTURE) and not store.has_current() and not store.usage()["entries"] and not store.clear()
    assert store.put(NAMES[0], b"content") and store.has(NAMES[0])


# What goes first.


def test_the_least_recently_used_entry_goes_first(three):
    three.limit = 5 * MIB // 4
    assert three.trim() > MIB // 2
    assert [*three.entries()] == [NAMES[2], NAMES[1]] and three.size() <= three.limit
    assert three.trim() == 0


def test_use_keeps_an_entry(three):
    three.get(NAMES[0])
    three.limit = 5 * MIB // 4
    three.trim()
    assert [*three.entries()] == [NAMES[0], NAMES[2]]


def test_what_is_put_makes_room_for_itself(three):
    three.limit = 5 * MIB // 4
    three.put("d" * 64, bytes(MIB // 2))
    assert [*three.entries()] == ["d" * 64, NAMES[2]]


def test_what_is_taken_from_a_shared_cache_makes_room_for_itself(three, stores, monkeypatch):
    """A worker of a fleet may never compile anything itself."""
    shared = unittest.mock.Mock()
    shared.get.return_value = bytes(MIB // 2)
    monkeypatch.setattr(stores, "configured", lambda: shared)
    three.limit = 5 * MIB // 4
    assert three.get("d" * 64) == bytes(MIB // 2)
    assert [*three.entries()] == ["d" * 64, NAMES[2]] and not shared.put.called


def test_entries_dated_in_the_future_go_first(three):
    age(three, NAMES[2], -(10**8))
    three.limit = 5 * MIB // 4
    three.trim()
    assert [*three.entries()] == [NAMES[1], NAMES[0]]


def test_a_limit_of_nothing_keeps_nothing(three):
    three.limit = 0
    three.put("d" * 64, b"content")
    assert [*three.entries()] == []


def test_what_killed_processes_leave_goes_after_an_hour(three):
    old, young, mine = (three.folder / f"{name}.tmp" for name in ("0a" * 16, "0b" * 16, "mine.txt"))
    for file in (old, young, mine.with_suffix("")):
        file.touch()
    for file in (old, mine.with_suffix("")):
        os.utime(file, (0, 0))
    three.put(NAMES[0], b"content")
    assert not old.exists() and young.exists() and mine.with_suffix("").exists()


def test_clearing_leaves_other_files_alone(three):
    three.remember(STRUCTURE, {"attention": "cudnn"})
    others = [three.folder / name for name in ("notes.txt", "mine.json", "mine.code", "signature.key")]
    for file in others:
        file.write_text("mine")
    assert three.clear() > MIB
    assert [*three.entries()] == [] and three.size() == 0 and not three.choices(STRUCTURE)
    assert all(file.read_text() == "mine" for file in others)


def test_what_windows_holds_on_to_stays_and_is_not_counted_as_removed(three, monkeypatch):
    unlink = Path.unlink

    def unlink_but_one(path, *args, **kwargs):
        if path.stem == NAMES[0]:
            raise PermissionError(13, "in use", str(path))
        unlink(path, *args, **kwargs)

    with monkeypatch.context() as windows:
        windows.setattr(Path, "unlink", unlink_but_one)
        assert MIB <= three.clear() < 3 * MIB // 2 and [*three.entries()] == [NAMES[0]]
    assert three.clear() > MIB // 2 and [*three.entries()] == []


def test_what_is_removed_while_it_is_looked_at_is_left_out(three, stores, monkeypatch):
    """By another server with the same folder."""
    status = stores.status_of

    def removed_meanwhile(file):
        if file.stem == NAMES[1]:
            file.unlink(missing_ok=True)
        return status(file)

    monkeypatch.setattr(stores, "status_of", removed_meanwhile)
    assert [*three.entries()] == [NAMES[2], NAMES[0]] and three.size() > MIB and len(three.usage()["entries"]) == 2


# What it tells.


def entry(environment, **about):
    return json.dumps({"class": "Block", "environment": environment, **about}).encode() + b"\nartefact"


def test_usage_tells_what_lies_where(store, engine):
    here = engine("cache.environment").environment()
    for name in NAMES[:2]:
        store.put(name, entry(here))
    usage = store.usage()
    assert usage["folder"] == str(store.folder) and usage["limit"] == 2 * MIB and usage["bytes"] == store.size()
    assert {told["name"] for told in usage["entries"]} == set(NAMES[:2])
    assert all(told["class"] == "Block" and told["torch"] == here["torch"] for told in usage["entries"])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"7\n", b"[]\n", b"[" * 16_000 + b"\n", b'{"environment": 7}\n', b"\xff\n", b'{"environment"',
        entry({"name": 7, "bytes": "many"}),
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_an_entry_with_an_odd_header_is_counted_and_never_current(store, content):
    """Somebody's cache file may bring one."""
    store.put(NAMES[0], content)
    (told,) = store.usage()["entries"]
    assert told["name"] == NAMES[0] and told["bytes"] == store.usage()["bytes"] == len(content) + 32
    assert not store.has_current()


def test_it_tells_whether_this_machine_has_compiled_as_it_is_now(engine, store, stores, monkeypatch):
    here = engine("cache.environment").environment()
    assert not store.has_current()
    store.put(NAMES[0], entry({**here, "torch": "9.9"}))
    assert not store.has_current()
    store.put(NAMES[1], entry(here))
    assert store.has_current()
    monkeypatch.setattr(stores, "environment", lambda: {**here, "device": "another"})
    assert not store.has_current()


def test_a_choice_is_recalled(stores, store):
    assert store.choices(STRUCTURE) == {}
    store.remember(STRUCTURE, {"attention": "cudnn"})
    store.remember(STRUCTURE, {"graphs": "pay"})
    later = stores.CodeStore(store.folder, MIB, store.key)
    assert later.choices(STRUCTURE) == {"attention": "cudnn", "graphs": "pay"}
    assert not later.choices("6" * 12)


def test_no_thread_loses_a_choice_of_another(stores, store, monkeypatch):
    write, other = stores.write_whole, threading.Thread(target=store.remember, args=(STRUCTURE, {"payback": "[]"}))

    def write_meanwhile(*args):
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits for this thread
        write(*args)

    monkeypatch.setattr(stores, "write_whole", write_meanwhile)
    store.remember(STRUCTURE, {"attention": "cudnn"})
    other.join()
    assert store.choices(STRUCTURE) == {"attention": "cudnn", "payback": "[]"}


def test_choices_that_cannot_be_read_for_a_moment_are_kept(stores, store, monkeypatch):
    store.remember(STRUCTURE, {"attention": "cudnn"})
    with monkeypatch.context() as patch:
        patch.setattr(stores, "read_whole", unittest.mock.Mock(side_effect=OSError(errno.EIO, "the drive does not answer")))
        store.remember(STRUCTURE, {"graphs": "pay"})
    assert store.choices(STRUCTURE) == {"attention": "cudnn"}


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"7", b'{"attention": 7}', b"[" * 100_000])
def test_choices_that_are_damaged_are_none(store, content):
    (store.folder / f"{STRUCTURE}.json").write_bytes(content)
    assert store.choices(STRUCTURE) == {}
    store.remember(STRUCTURE, {"attention": "cudnn"})
    assert store.choices(STRUCTURE) == {"attention": "cudnn"}


# Several servers.


def test_servers_that_start_at_once_sign_with_one_key(stores, tmp_path):
    started = threading.Barrier(16)

    def start(_server):
        started.wait()
        return stores.read_key(tmp_path)

    with ThreadPoolExecutor(16) as servers:
        keys = [*servers.map(start, range(16))]
    assert len(set(keys)) == 1 and [file.name for file in tmp_path.iterdir()] == ["signature.key"]


def test_a_key_that_another_server_has_open_is_no_lost_key(engine, stores, tmp_path, monkeypatch):
    """Windows opens no file that another process is about to remove or replace: the key was made anew, and entries lost."""
    key, real, refusals = stores.read_key(tmp_path), os.open, [PermissionError(13, "in use")] * 3

    def refusing(file, *given):
        if refusals and Path(file).name == "signature.key":
            raise refusals.pop()
        return real(file, *given)

    monkeypatch.setattr(engine("files"), "READERS_BLOCK", True)
    monkeypatch.setattr(os, "open", refusing)
    assert stores.read_key(tmp_path) == key and not refusals


def test_a_drive_without_links_has_a_key_too(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", unittest.mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    key = stores.read_key(tmp_path)
    assert len(key) == 32 and stores.read_key(tmp_path) == key
    assert [file.name for file in tmp_path.iterdir()] == ["signature.key"]


def test_several_servers_write_read_and_trim_one_folder(stores, tmp_path):
    key, names = stores.read_key(tmp_path), [f"{number:064x}" for number in range(20)]

    def serve(seed):
        store, numbers = stores.CodeStore(tmp_path, 200_000, key), random.Random(seed)
        for _ in range(100):
            name = numbers.choice(names)
            assert store.get(name) in (None, name.encode() * 400)
            store.put(name, name.encode() * 400)
            store.usage()

    with ThreadPoolExecutor(3) as servers:
        assert len([*servers.map(serve, range(3))]) == 3
    assert not list(tmp_path.glob("*.tmp"))
    assert stores.CodeStore(tmp_path, 0, key).size() <= 3 * 200_000


# Where the store is.


@pytest.fixture
def opened(stores, monkeypatch, tmp_path):
    """open_store as in a process that has opened none."""

    def opened(folder=tmp_path / "kit" / "store"):
        monkeypatch.setattr(stores._Current, "opened", False)
        monkeypatch.setattr(stores._Current, "store", None)
        return stores.open_store(folder)

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_COMPILE_KIT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return opened


def test_it_is_opened_once(opened, stores, tmp_path):
    store = opened()
    assert store.folder == tmp_path / "kit" / "store" and stores.current() is store
    assert stores.open_store(tmp_path / "another") is store and not (tmp_path / "another").exists()


@posix
def test_a_new_store_is_private(opened):
    before = os.umask(0)
    try:
        store = opened()
    finally:
        os.umask(before)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert (store.folder / "signature.key").stat().st_mode & 0o777 == 0o600


@posix
def test_a_key_that_cannot_be_read_now_is_kept(opened, monkeypatch):
    """A network volume may fail for a moment."""
    key = opened().folder / "signature.key"
    content, opens = key.read_bytes(), os.open

    def failing(path, *args, **kwargs):
        if str(path) == str(key):
            raise OSError(errno.EIO, "the drive does not answer")
        return opens(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    assert opened().folder != key.parent
    assert key.read_bytes() == content


@posix
@pytest.mark.parametrize("change", ["mode", "link", "size", "pipe", "folder"])
def test_a_key_that_others_could_have_is_replaced_and_no_entry_of_before_is_used(opened, tmp_path, change, caplog):
    before = opened()
    before.put(NAMES[0], b"content")
    key = before.folder / "signature.key"
    (tmp_path / "theirs").write_bytes(key.read_bytes())
    key.unlink()
    if change == "mode":
        key.write_bytes((tmp_path / "theirs").read_bytes())
        key.chmod(0o640)
    elif change == "link":
        key.symlink_to(tmp_path / "theirs")
    elif change == "size":
        key.touch(0o600)
    elif change == "pipe":
        os.mkfifo(key, 0o600)
    else:
        key.mkdir()
        assert opened().folder != before.folder
        return
    after = opened()
    assert after.folder == before.folder and after.key != before.key and key.stat().st_mode & 0o777 == 0o600
    assert f"{key} (" in caplog.text and "all code is compiled anew" in caplog.text  # Kubernetes' fsGroup opens it each time
    assert after.get(NAMES[0]) is None and "not written by this user" in caplog.text
    after.put(NAMES[0], b"content")
    assert opened().get(NAMES[0]) == b"content"


@posix
def test_a_key_of_another_user_is_not_used(opened, tmp_path, monkeypatch):
    opened()
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    assert opened() is None, "what is made here is that user's, too"
    assert [file.name for file in (tmp_path / "kit" / "store").iterdir()] == []


@posix
def test_a_folder_that_others_can_write_is_used_as_its_entries_are_signed(opened, tmp_path, caplog):
    """As /workspace of a pod, with mode 777."""
    store = opened()
    store.put(NAMES[0], b"content")
    store.folder.chmod(0o777)
    store._file(NAMES[1]).write_bytes(b"theirs" * 100)
    again = opened()
    assert again.folder == tmp_path / "kit" / "store" and not caplog.text
    assert again.get(NAMES[0]) == b"content" and again.get(NAMES[1]) is None


@posix
def test_on_a_drive_without_rights_a_folder_elsewhere_is_used_and_said_once(opened, stores, tmp_path, monkeypatch, caplog):
    key_in = stores._key_in
    monkeypatch.setattr(stores, "_key_in", lambda file: b"" if tmp_path / "kit" in file.parents else key_in(file))
    for _start in range(2):
        caplog.clear()
        store = opened()
        assert store.folder == tmp_path / "home" / ".cache" / "torch-compile-kit" / "store"
        (said,) = caplog.messages
        assert f"{tmp_path / 'kit' / 'store'} cannot be used: its drive keeps no rights" in said
        assert f"goes to {store.folder}; TORCH_COMPILE_KIT_CACHE names another folder" in said
    assert list((tmp_path / "kit" / "store").iterdir()) == []
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("no folder can be made here")
    assert opened().folder == tmp_path / "tmp" / f"torch-compile-kit-{os.geteuid()}" / "store"


def test_where_no_folder_can_be_made_nothing_is_kept_and_that_is_said(opened, stores, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stores, "read_key", unittest.mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    assert opened() is None and "no other, and is lost at the next restart" in caplog.text


def test_without_a_folder_for_temporary_files_the_users_is_used(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", unittest.mock.Mock(side_effect=FileNotFoundError("no usable directory")))
    assert opened().folder == tmp_path / "kit" / "store"


@posix
def test_a_user_without_a_name_and_home_has_a_store_too(opened, tmp_path, monkeypatch):
    """As in a container that is started with any number for its user."""
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unittest.mock.Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit").write_text("no folder can be made here")
    assert opened().folder == tmp_path / "tmp" / f"torch-compile-kit-{os.geteuid()}" / "store"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert opened().folder == tmp_path / "inductor" / "torch-compile-kit"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "inductor")
    assert opened().folder == tmp_path / "inductor" / "torch-compile-kit"


@pytest.mark.parametrize("name", ["gr\u00fcn", "AI stuff", "Ann's"])
def test_a_folder_may_have_any_name(opened, tmp_path, name):
    """No C++ is compiled in it, so no compiler splits its path."""
    assert opened(tmp_path / name / "store").folder == tmp_path / name / "store"


def test_the_folder_that_the_user_names_goes_first(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert opened().folder == tmp_path / "inductor" / "torch-compile-kit"
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path / "volume"))
    assert opened().folder == tmp_path / "volume" / "torch-compile-kit"
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path / "volume" / "torch-compile-kit"))
    assert opened().folder == tmp_path / "volume" / "torch-compile-kit", "it is named already"


def test_a_folder_of_the_users_home(opened, tmp_path, monkeypatch):
    """No shell expands what a Dockerfile or a service sets. A folder named `~` was made, which `rm -r ~` does not remove."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", "~/volume")
    assert opened().folder == tmp_path / "volume" / "torch-compile-kit"


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_KIT_CACHE", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_else_is_in_the_folder_that_the_user_names_is_left_alone(opened, tmp_path, monkeypatch, variable):
    """As /workspace of a pod, which holds everything."""
    volume = tmp_path / "volume"
    theirs = [volume / name for name in (f"{'0a' * 16}.tmp", f"{'0' * 64}.code", f"{'0' * 12}.json", "0/1.jpg")]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        os.utime(file, (0, 0))
    volume.chmod(0o777)
    mode = volume.stat().st_mode
    monkeypatch.setenv(variable, str(volume))
    store = opened()
    store.put(NAMES[0], b"content")
    assert store.clear() > 0
    assert all(file.read_text() == "mine" for file in theirs) and volume.stat().st_mode == mode


def test_a_store_that_is_open_is_told_while_another_thread_opens_it(opened, stores, tmp_path):
    """The server's event loop asks."""
    store, told = opened(), []
    asks = threading.Thread(target=lambda: told.append(stores.open_store(tmp_path)), daemon=True)
    with stores._Current.lock:
        asks.start()
        asks.join(5)
        assert told == [store]


# What code depends on.


@pytest.fixture
def depends(engine):
    """What compiled code depends on, without what other tests have it remember."""
    module = engine("cache.environment")
    yield module
    module.environment.cache_clear()


@pytest.mark.parametrize(("text", "gib"), [("", 2), ("0.5", 0.5), ("0", 0), ("much", 2), ("-1", 2), ("inf", 2), ("nan", 2)])
def test_the_limit_can_be_set(depends, monkeypatch, text, gib):
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE_GIB", text)
    assert depends.limit_in_bytes() == int(gib * 1024**3)
    assert depends.limit_in_bytes(7) == int((gib if text else 7) * 1024**3), "the variable goes before the setting"


def test_code_of_ours_that_decides_what_is_compiled_is_part_of_the_key(depends, monkeypatch, tmp_path):
    folder = Path(depends.__file__).parent.parent
    for pattern in depends.SOURCES:
        assert list(folder.glob(pattern)), f"{pattern} is nothing: the digest would never change"
    names = {file.name for pattern in depends.SOURCES for file in folder.glob(pattern)}
    assert {"backend.py", "rotary_norms.py", "kitchen.py", "lowering_settings.py", "torch_settings.py"} <= names
    shutil.copytree(folder, tmp_path / "engine")
    monkeypatch.setattr(depends, "__file__", str(tmp_path / "engine" / "cache" / "environment.py"))
    seen = {depends.version_of_pack()}
    for name in ("inductor/backend.py", "compile_process/lowering_settings.py", "torch_settings.py"):
        with (tmp_path / "engine" / name).open("a") as file:
            file.write("# changed\n")
        seen.add(depends.version_of_pack())
    assert len(seen) == 4


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


KEYS = ["torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen", "code of the pack"]


@pytest.mark.parametrize("key", KEYS)
def test_each_of_what_it_depends_on_gives_names_of_their_own(key, depends, engine, monkeypatch):
    """Of code, and of choices."""
    import torch

    request, structure = engine("compile_process.obtain"), engine("cache.structure")
    here = dict(depends.environment())
    assert here[key]

    def names():
        graph = torch.fx.symbolic_trace(torch.nn.Identity())
        return request.request_for(graph, [], {}, torch.device("cpu")).key, structure.name_of(torch.nn.Linear(2, 2))

    before = names()
    for module in (request, structure):
        monkeypatch.setattr(module, "environment", lambda: {**here, key: "another"})
    assert all(one != other for one, other in zip(before, names(), strict=True))


def test_the_version_of_windows_triton_tells_its_mends(depends, monkeypatch):
    monkeypatch.setattr(depends, "TRITON_WINDOWS", "3.5.1.post24")
    assert depends.versions()["triton"] == "3.5.1.post24"


def test_the_version_of_the_hosts_kernels_is_told(depends):
    assert re.match(r"\d+\.\d+", depends.environment()["comfy-kitchen"])


def test_the_name_of_choices_depends_on_the_structure_alone(engine):
    from support import Net

    structure = engine("cache.structure")
    first, second = Net(count=2).blocks
    of = structure.structure_of
    assert structure.short_name("Block", of(first)) == structure.short_name("Block", of(second))
    others = structure.short_name("Other", of(first)), structure.short_name("Block", of(Net(width=16).blocks[0]))
    assert len({*others, structure.short_name("Block", of(first))}) == 3


def test_the_order_in_which_a_loader_makes_weights_is_no_structure(engine):
    """ComfyUI 0.33 makes biases after the weights of other layers under dynamic VRAM; prebuild.py runs without."""
    import torch

    first, second = (torch.nn.Linear(2, 2) for _ in range(2))
    second.weight, weight = None, second.weight
    del second._parameters["weight"]
    second.weight = weight
    assert [*dict(first.named_parameters())] != [*dict(second.named_parameters())]
    of = engine("cache.structure").structure_of
    assert of(first) == of(second)
