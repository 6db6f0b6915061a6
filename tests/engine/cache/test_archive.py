"""The file that a cache travels in, and everything that a bad file can be."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

NAMES = ["a" * 64, "b" * 64]
STRUCTURE = "5" * 12
MIB = 1024**2


@pytest.fixture
def stores(engine):
    return engine("cache.code_store")


@pytest.fixture
def here(engine):
    return engine("cache.environment").environment()


@pytest.fixture
def files(engine):
    return engine("cache.archive")


@pytest.fixture
def store(stores, tmp_path):
    (tmp_path / "store").mkdir()
    return stores.CodeStore(tmp_path / "store", 2 * MIB, b"k" * 32)


@pytest.fixture
def saved(files, store, tmp_path):
    """A small store, and the file that was made of it."""
    for name in NAMES:
        store.put(name, b"graph " + name.encode())
    store.remember(STRUCTURE, {"attention": "cudnn"})
    path = tmp_path / "mine.tckcache"
    assert files.write_cache_file(path, store, NAMES, [STRUCTURE, "6" * 12], "0.1.0", ["Flux"], ["64x64 batch 1"]) == 2
    return path


@pytest.fixture
def empty(stores, tmp_path):
    """Another machine's."""
    (tmp_path / "empty").mkdir()
    return stores.CodeStore(tmp_path / "empty", MIB, b"l" * 32)


def contents(root):
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def parts_of(path):
    """The header of a file, and the bytes behind it, less the digest."""
    _format, header, rest = path.read_bytes()[:-64].split(b"\n", 2)
    return json.loads(header), rest


def rewritten(path, header=None, first=b"torch-compile-kit cache 7", extra=(), **changes):
    """The file with another header or other entries, and a digest that fits: what someone could send."""
    known, rest = parts_of(path)
    for name in extra:
        known["parts"].append([name, 1])
        rest += b"\0"
    header = json.dumps(known | changes).encode() if header is None else header
    path.write_bytes(first + b"\n" + header + b"\n" + rest + b"0" * 64)
    sealed(path)


def sealed(path):
    """With the digest at its end that fits what is before."""
    data = path.read_bytes()[:-64]
    path.write_bytes(data + hashlib.sha256(data).hexdigest().encode())


def refused(files, path, store):
    with pytest.raises(files.CacheFileError, match=path.name) as error:
        files.load_cache_file(path, store)
    assert not list(store.folder.iterdir())
    assert len(str(error.value)) < 1000
    return str(error.value)


def test_what_is_saved_is_loaded(files, here, saved, empty):
    found = files.load_cache_file(saved, empty)
    assert (found.models, found.sizes) == (["Flux"], ["64x64 batch 1"])
    assert parts_of(saved)[0]["pack"] == "0.1.0" and set(found.entries) == set(NAMES) == {*empty.entries()}
    assert all(empty.get(name) == b"graph " + name.encode() for name in NAMES)
    assert empty.choices(STRUCTURE) == {"attention": "cudnn"} and not empty.choices("6" * 12)


def test_it_is_named_as_what_it_is(files, saved):
    assert files.SUFFIX == ".tckcache"
    first, header, _rest = saved.read_bytes().split(b"\n", 2)
    assert first.startswith(b"torch-compile-kit cache") and b"64x64 batch 1" in header, "a person can look into it"


def test_no_signature_of_this_user_is_in_it(saved, store):
    assert store._file(NAMES[0]).read_bytes()[:32] not in saved.read_bytes() and store.key not in saved.read_bytes()


def test_what_is_there_already_stays(files, saved, empty):
    empty.put(NAMES[0], b"mine")
    empty.remember(STRUCTURE, {"attention": "mine"})
    files.load_cache_file(saved, empty)
    assert empty.get(NAMES[0]) == b"mine" and empty.get(NAMES[1]) is not None
    assert empty.choices(STRUCTURE) == {"attention": "mine"}
    assert len(list(empty.folder.iterdir())) == 3, "nothing is left of unpacking"


def test_what_was_loaded_is_not_the_first_that_goes(files, saved, empty):
    """Though it was there already, an old one."""
    for name, seconds in ((NAMES[0], 9000), ("c" * 64, 5000)):
        empty.put(name, bytes(1000))
        os.utime(empty._file(name), (time.time() - seconds,) * 2)
    files.load_cache_file(saved, empty)
    empty.limit = 1500
    empty.trim()
    assert {*empty.entries()} == set(NAMES)


def test_neither_saving_nor_loading_asks_the_shared_cache(files, store, stores, tmp_path, empty, monkeypatch):
    """The sampler waits for both."""
    store.put(NAMES[0], b"graph")
    monkeypatch.setattr(stores, "configured", lambda: pytest.fail("it is asked"))
    files.write_cache_file(tmp_path / "one.tckcache", store, NAMES, [], "0.1.0", [], [])
    assert list(files.load_cache_file(tmp_path / "one.tckcache", empty).entries) == NAMES[:1]


def test_what_a_killed_save_has_left_beside_the_file_goes_with_the_next(files, store, saved):
    left, young, mine = (saved.with_name(f"{name}.tmp") for name in ("0a" * 16, "0b" * 16, "mine"))
    for file in (left, young, mine):
        file.write_text("left")
    for file in (left, mine):
        os.utime(file, (0, 0))
    files.write_cache_file(saved, store, NAMES, [], "0.1.0", [], [])
    assert not left.exists() and young.exists() and mine.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU nobody asks the CPU")
def test_code_for_another_cpu_is_refused(engine, files, saved, empty, tmp_path, monkeypatch):
    """Of the same vector width: it may lack instructions that the code has."""
    machine = engine("cache.environment")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")

    def cpu(flags):
        machine.CPU_INFO.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
        machine.environment.cache_clear()

    try:
        cpu("avx512f amx_tile")
        empty.put(NAMES[0], b"graph")
        files.write_cache_file(saved, empty, [NAMES[0]], [], "0.1.0", ["Flux"], [])
        cpu("amx_tile avx512f")
        files.load_cache_file(saved, empty)
        cpu("avx512f")
        with pytest.raises(files.CacheFileError, match="made for another machine: device is CPU"):
            files.load_cache_file(saved, empty)
    finally:
        machine.environment.cache_clear()


def test_the_header_tells_where_it_fits(saved, here):
    header, _rest = parts_of(saved)
    known = {"torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen", "code of the pack"}
    assert known == set(here) and header["environment"] == here


def test_one_flipped_byte_anywhere_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x1C if position % 2 else 0x01
        saved.write_bytes(flipped)
        with pytest.raises(files.CacheFileError, match=saved.name):
            files.load_cache_file(saved, empty)
    assert not list(empty.folder.iterdir())
    saved.write_bytes(data)
    files.load_cache_file(saved, empty)


def test_flipped_bytes_under_a_digest_that_fits_are_refused_in_words_or_harmless(files, stores, saved, empty):
    """The file as somebody with a hex editor could send it: any error but ours would stop the prompt."""
    data = saved.read_bytes()
    for position in range(len(data) - 64):
        flipped = bytearray(data)
        flipped[position] ^= 0x1C if position % 2 else 0x81
        saved.write_bytes(flipped)
        sealed(saved)
        try:
            files.load_cache_file(saved, empty)
        except files.CacheFileError:
            continue
        outside = {file.name for file in saved.parent.iterdir()}
        assert outside == {"mine.tckcache", "store", "empty"}, position
        assert all(stores.NAME.fullmatch(name) for name in [*empty.entries()]), position


def test_a_part_of_a_file_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        assert "Copy it again" in refused(files, saved, empty)
    saved.write_bytes(data + b"x")
    refused(files, saved, empty)


def test_the_helper_makes_files_that_load(files, saved, empty):
    rewritten(saved, extra=[f"{'c' * 64}-1"])
    files.load_cache_file(saved, empty)
    assert empty.get(f"{'c' * 64}-1") == b"\0"


@pytest.mark.parametrize("key", ["torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen"])
def test_another_machine_is_refused_with_both_values(files, here, saved, empty, key):
    rewritten(saved, environment={**here, key: "quite another"})
    assert f"{key} is {here[key]} here, quite another in the file" in refused(files, saved, empty)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", f"../{NAMES[0]}", f"/tmp/{NAMES[0]}", f"{NAMES[0]}/a", f"..\\{NAMES[0]}", f"C:{NAMES[0]}",
        f"{NAMES[0]}.code", f"{NAMES[0]}-0", f"{NAMES[0]}\n", "signature.key", STRUCTURE, "a" * 60_000,
    ],
    ids=lambda name: repr(name[:30]),
)  # fmt: skip
def test_an_entry_that_leads_elsewhere_is_refused(files, saved, empty, tmp_path, name):
    before = contents(tmp_path)
    rewritten(saved, extra=[name])
    assert "which is no compiled code" in refused(files, saved, empty)
    before.pop(saved.name)
    after = contents(tmp_path)
    after.pop(saved.name)
    assert after == before and not Path(f"/tmp/{NAMES[0]}.code").exists()


def test_other_files_are_refused(files, saved, empty):
    saved.write_bytes(b"x" * 1000)
    sealed(saved)
    assert "no file of Save Compile Cache" in refused(files, saved, empty)


ODD_HEADERS = (
    b"", b"7", b"null", b"[]", b'"text"', b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe",
    "\udc80".encode("utf-8", "surrogatepass"), b"9" * 10_000, b'{"environment": {"a": []}}',
)  # fmt: skip
ODD_CHOICES = None, 7, [7], {"../x": {}}, {STRUCTURE: 7}, {STRUCTURE: [["a", "b"]]}
ODD_ENTRIES = [7], [[7, 7]], [[NAMES[0]]], [[NAMES[0], "7"]], [[NAMES[0], 10**9]], [[NAMES[0], -7]], []
OTHER_FORMATS = b"torch-compile-kit cache 6", b"", b"PK\x03\x04"
CHANGES = [
    *({"first": first} for first in OTHER_FORMATS),
    *({"header": header} for header in ODD_HEADERS),
    *({"choices": choices} for choices in ODD_CHOICES),
    *({"parts": entries} for entries in ODD_ENTRIES),
    *({key: value} for key in ("environment", "models", "sizes", "parts") for value in (None, 7)),
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: str(changes)[:30])
def test_another_format_and_what_does_not_fit_it_are_refused(files, saved, empty, changes):
    rewritten(saved, **changes)
    assert ("of another version" in refused(files, saved, empty)) is ("first" in changes)


def test_nothing_compiled_is_no_file(files, store, tmp_path):
    with pytest.raises(files.CacheFileError, match="Warmup"):
        files.write_cache_file(tmp_path / "none.tckcache", store, NAMES, [STRUCTURE], "0.1.0", [], [])
    assert not list(tmp_path.glob("*.tckcache*"))


def test_code_that_has_gone_from_the_store_is_left_out(files, store, saved):
    """It makes room for other code, or another server has removed it."""
    store._file(NAMES[0]).unlink()
    assert files.write_cache_file(saved, store, NAMES, [], "0.1.0", [], []) == 1


def test_what_cannot_be_written_is_said_and_leaves_the_file_of_before(engine, files, store, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(engine("files"), "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(files.CacheFileError, match="No space left"):
        files.write_cache_file(saved, store, NAMES, [], "0.1.0", [], [])
    assert saved.read_bytes() == before


def test_a_large_file_of_another_kind_is_refused_unread(files, saved, empty):
    """A model that got the suffix: 20 GB."""
    with saved.open("wb") as file:
        file.truncate(2**40 if os.name == "posix" else 2**30)  # on Windows a file takes its whole size
    assert "no file of Save Compile Cache" in refused(files, saved, empty)


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows' profiles are private")


@posix
@pytest.mark.parametrize(("mode", "gid", "uid"), [(0o602, None, None), (0o620, 4321, None), (0o600, None, 4321)])
def test_no_file_is_loaded_that_others_could_have_written(files, saved, empty, mode, gid, uid):
    if (gid or uid) and os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(saved, uid or -1, gid or -1)
    saved.chmod(mode)
    said = refused(files, saved, empty)
    assert "another user (" in said and f"chmod go-w '{saved}'" in said
    os.chown(saved, os.geteuid(), -1)
    saved.chmod(mode & ~0o022)
    files.load_cache_file(saved, empty)


@posix
def test_a_file_is_loaded_that_only_the_users_own_group_could_have_written(files, saved, empty):
    """As all files are that are copied under Ubuntu's umask, 0002."""
    os.chown(saved, -1, os.getegid())
    saved.chmod(0o664)
    files.load_cache_file(saved, empty)


@posix
def test_on_a_drive_without_rights_a_file_is_loaded(files, saved, empty, monkeypatch):
    """The user has put it there and chosen it; nobody can tell who has written it."""
    fstat = os.fstat

    def all_may(number):
        status = list(fstat(number))
        status[0] |= 0o777
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", all_may)
    files.load_cache_file(saved, empty)
    assert {*empty.entries()} == set(NAMES)
