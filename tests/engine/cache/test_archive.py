"""The file that a cache travels in, and everything that a bad file can be."""

import hashlib
import json
import os
import time
import zipfile
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
    store.remember(STRUCTURE, "attention", "cudnn")
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


def header_of(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("header.json"))


def rewritten(path, extra=(), header=None, compression=zipfile.ZIP_STORED, **changes):
    """The file with another header or other members, and digests that fit: what someone could send."""
    with zipfile.ZipFile(path) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    known = json.loads(inside.pop("header.json"))
    inside |= dict.fromkeys(extra, b"\0")
    known |= changes
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in inside.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
        archive.writestr("header.json", json.dumps(known) if header is None else header)
        archive.comment = b"0" * 64
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
    header = files.load_cache_file(saved, empty)
    assert (header.models, header.sizes, header.environment) == (["Flux"], ["64x64 batch 1"], here)
    assert header_of(saved)["pack"] == "0.1.0" and set(header.names) == set(NAMES) == set(empty.names())
    assert all(empty.get(name) == b"graph " + name.encode() for name in NAMES)
    assert empty.choices(STRUCTURE) == {"attention": "cudnn"} and not empty.choices("6" * 12)


def test_it_is_named_as_what_it_is(engine, saved):
    assert engine("cache.folders").SUFFIX == ".tckcache"
    assert zipfile.is_zipfile(saved), "any zip tool shows what is inside"
    assert all(info.compress_type == zipfile.ZIP_STORED for info in zipfile.ZipFile(saved).infolist())


def test_no_signature_of_this_user_is_in_it(saved, store):
    assert store._file(NAMES[0]).read_bytes()[:32] not in saved.read_bytes() and store.key not in saved.read_bytes()


def test_what_is_there_already_stays(files, saved, empty):
    empty.put(NAMES[0], b"mine")
    empty.remember(STRUCTURE, "attention", "mine")
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
    assert set(empty.names()) == set(NAMES)


def test_neither_saving_nor_loading_asks_the_shared_cache(files, store, stores, tmp_path, empty, monkeypatch):
    """The sampler waits for both."""
    store.put(NAMES[0], b"graph")
    monkeypatch.setattr(stores, "configured", lambda: pytest.fail("it is asked"))
    files.write_cache_file(tmp_path / "one.tckcache", store, NAMES, [], "0.1.0", [], [])
    assert files.load_cache_file(tmp_path / "one.tckcache", empty).names == NAMES[:1]


def test_what_a_killed_save_has_left_beside_the_file_goes_with_the_next(files, store, saved):
    left, young, mine = (
        saved.with_name(f"{name}.partial") for name in ("torch-compile-kit-a1_b", "torch-compile-kit-2", "mine")
    )
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
    header = header_of(saved)
    assert header["models"] == ["Flux"] and header["sizes"] == ["64x64 batch 1"]
    known = {"torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen", "code of the pack"}
    assert known == set(here) <= set(header)


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
        assert all(stores.NAME.fullmatch(name) for name in empty.names()), position


def test_a_part_of_a_file_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        assert "only a part" in refused(files, saved, empty)
    saved.write_bytes(data + b"x")
    refused(files, saved, empty)


def test_the_helper_makes_files_that_load(files, saved, empty):
    rewritten(saved, extra=[f"{'c' * 64}-1.code"])
    files.load_cache_file(saved, empty)
    assert empty.get(f"{'c' * 64}-1") == b"\0"


@pytest.mark.parametrize("key", ["torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen"])
def test_another_machine_is_refused_with_both_values(files, here, saved, empty, key):
    rewritten(saved, **{key: "quite another"})
    assert f"{key} is {here[key]} here, quite another in the file" in refused(files, saved, empty)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", f"../{NAMES[0]}.code", f"/tmp/{NAMES[0]}.code", f"{NAMES[0]}/a.code", f"..\\{NAMES[0]}.code",
        f"C:{NAMES[0]}.code", f"{NAMES[0]}.json", f"{NAMES[0]}", f"{NAMES[0]}-0.code", f"{NAMES[0]}\n.code", "signature.key",
        f"{STRUCTURE}.json", "a" * 60_000,
    ],
    ids=lambda name: repr(name[:30]),
)  # fmt: skip
def test_a_member_that_leads_elsewhere_is_refused(files, saved, empty, tmp_path, name):
    before = contents(tmp_path)
    rewritten(saved, extra=[name])
    assert "which is no compiled code" in refused(files, saved, empty)
    before.pop(saved.name)
    after = contents(tmp_path)
    after.pop(saved.name)
    assert after == before and not Path(f"/tmp/{NAMES[0]}.code").exists()


@pytest.mark.parametrize("made", [None, "torch-compile-kit cache 4", 7, ["torch-compile-kit cache 5"]])
def test_another_format_is_refused(files, saved, empty, made):
    rewritten(saved, format=made)
    assert "the format is" in refused(files, saved, empty)


def test_other_files_are_refused(files, saved, empty):
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("a", "b")
    assert "no file of Save Compile Cache" in refused(files, saved, empty)
    saved.write_bytes(b"x" * 1000)
    sealed(saved)
    assert "BadZipFile" in refused(files, saved, empty)


@pytest.mark.parametrize(
    "header",
    [
        "", "7", "null", "[]", '"text"', "[" * 200_000, '{"a":' * 200_000, b"\xff\xfe",
        "\udc80".encode("utf-8", "surrogatepass"), "9" * 10_000, '{"format": {"a": []}}',
    ],
    ids=lambda header: repr(header[:12]),
)  # fmt: skip
def test_an_odd_header_is_refused(files, saved, empty, header):
    rewritten(saved, header=header)
    refused(files, saved, empty)


@pytest.mark.parametrize(
    "choices", [None, 7, [7], {"../x": {}}, {STRUCTURE: 7}, {STRUCTURE: {"attention": 7}}, {STRUCTURE: [["a", "b"]]}], ids=str
)
def test_choices_of_other_types_are_refused(files, saved, empty, choices):
    rewritten(saved, choices=choices)
    refused(files, saved, empty)


@pytest.mark.parametrize("key", ["torch", "models", "sizes"])
@pytest.mark.parametrize("value", [None, 7, [7], {"a": 7}, {"a": {}}, [["a"]], [None]], ids=str)
def test_a_header_with_other_types_is_refused(files, saved, empty, key, value):
    rewritten(saved, **{key: value})
    refused(files, saved, empty)


def test_compressed_members_are_refused(files, saved, empty):
    rewritten(saved, compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(files, saved, empty)


def test_a_member_twice_is_refused(files, saved, empty):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(saved, "a") as archive:
        archive.writestr(f"{NAMES[0]}.code", "{}")
    sealed(saved)
    assert "in the file twice" in refused(files, saved, empty)


def test_nothing_compiled_is_no_file(files, store, tmp_path):
    with pytest.raises(files.CacheFileError, match="Warmup"):
        files.write_cache_file(tmp_path / "none.tckcache", store, NAMES, [STRUCTURE], "0.1.0", [], [])
    assert not list(tmp_path.glob("*.tckcache*"))


def test_code_that_has_gone_from_the_store_is_left_out(files, store, saved):
    """It makes room for other code, or another server has removed it."""
    store._file(NAMES[0]).unlink()
    assert files.write_cache_file(saved, store, NAMES, [], "0.1.0", [], []) == 1


def test_what_cannot_be_written_is_said_and_leaves_nothing(files, store, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(files, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(files.CacheFileError, match="No space left"):
        files.write_cache_file(saved, store, NAMES, [], "0.1.0", [], [])
    assert saved.read_bytes() == before and not list(saved.parent.glob("*.partial"))


def test_a_large_file_of_another_kind_is_refused_unread(files, saved, empty):
    """A model that got the suffix: 20 GB."""
    with saved.open("wb") as file:
        file.truncate(2**40)
    assert "no file of Save Compile Cache" in refused(files, saved, empty)
