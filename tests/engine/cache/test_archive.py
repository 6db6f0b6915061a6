"""The file that a cache travels in, and everything that a bad file can be."""

import hashlib
import json
import os
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch

NAMES = ["0" * 12, "1" * 12]
MIB = 1024**2


@pytest.fixture
def disk_cache(engine):
    return engine("cache.disk")


@pytest.fixture
def files(engine):
    return engine("cache.archive")


@pytest.fixture
def cache(disk_cache, tmp_path):
    return disk_cache.DiskCache(tmp_path / "cache", 2 * MIB)


def filled(cache, contents, name=NAMES[0]):
    """A kind's folder with these files."""
    cache.enter(name, "Block")
    cache.exit(name)
    for path, content in contents.items():
        file = cache.root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


@pytest.fixture
def saved(files, cache, tmp_path):
    """A small cache, and the file that was made of it."""
    filled(cache, {"aotautograd/ab/entry": b"graph", "ab/abc.best_config": b"", "triton/x/k.cubin": b"k", "locks/a.lock": b""})
    path = tmp_path / "mine.tckcache"
    assert files.write_cache_file(path, cache, [NAMES[0]], "0.1.0", ["Flux"], ["64x64 batch 1"]) == 3
    return path


@pytest.fixture
def empty(disk_cache, tmp_path):
    return disk_cache.DiskCache(tmp_path / "empty", MIB)


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


def refused(files, path, cache):
    with pytest.raises(files.CacheFileError, match=path.name) as error:
        files.load_cache_file(path, cache)
    assert not cache.root.exists() or not list(cache.root.iterdir())
    assert len(str(error.value)) < 1000
    return str(error.value)


def test_what_is_saved_is_loaded(files, disk_cache, saved, empty):
    found = files.load_cache_file(saved, empty)
    assert (found.models, found.sizes) == (["Flux"], ["64x64 batch 1"]) and header_of(saved)["pack"] == "0.1.0"
    assert found.environment == disk_cache.environment()
    loaded = contents(empty.root)
    assert loaded[f"{NAMES[0]}/aotautograd/ab/entry"] == b"graph" and loaded[f"{NAMES[0]}/ab/abc.best_config"] == b""
    assert (
        set(loaded) == set(found.members) and len(loaded) == len(found.members) and not any("triton" in name for name in loaded)
    )


def test_it_is_named_as_what_it_is(engine, saved):
    assert engine("cache.folders").SUFFIX == ".tckcache"
    assert zipfile.is_zipfile(saved), "any zip tool shows what is inside"
    assert all(info.compress_type == zipfile.ZIP_STORED for info in zipfile.ZipFile(saved).infolist())


def test_what_is_there_already_stays(files, saved, empty):
    filled(empty, {"aotautograd/ab/entry": b"mine"})
    files.load_cache_file(saved, empty)
    assert (empty.root / NAMES[0] / "aotautograd/ab/entry").read_bytes() == b"mine"
    assert (empty.root / NAMES[0] / "ab/abc.best_config").exists()
    assert [entry.name for entry in empty.root.iterdir()] == [NAMES[0]], "nothing is left of unpacking"


def test_what_was_loaded_is_not_the_first_that_goes(files, saved, empty):
    """Though its folder is an old one."""
    filled(empty, {})
    filled(empty, {"entry": bytes(1000)}, NAMES[1])
    for name, age in zip(NAMES, (9000, 5000), strict=True):
        os.utime(empty.root / name / "about.json", (time.time() - age,) * 2)
    before = empty.usage()["bytes"]
    files.load_cache_file(saved, empty)
    assert empty.usage()["bytes"] > before
    empty.limit = 1000
    empty.trim()
    assert [folder.name for folder in empty.folders()] == [NAMES[0]]


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
        filled(empty, {"entry": b"graph"})
        files.write_cache_file(saved, empty, [NAMES[0]], "0.1.0", ["Flux"], [])
        cpu("amx_tile avx512f")
        files.load_cache_file(saved, empty)
        cpu("avx512f")
        with pytest.raises(files.CacheFileError, match="made for another machine: device is CPU"):
            files.load_cache_file(saved, empty)
    finally:
        machine.environment.cache_clear()


def test_the_header_tells_where_it_fits(saved, disk_cache):
    header = header_of(saved)
    assert header["models"] == ["Flux"] and header["sizes"] == ["64x64 batch 1"]
    known = {"torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen", "code of the pack"}
    assert known == set(disk_cache.environment()) <= set(header)


def test_one_flipped_byte_anywhere_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x1C if position % 2 else 0x01
        saved.write_bytes(flipped)
        with pytest.raises(files.CacheFileError, match=saved.name):
            files.load_cache_file(saved, empty)
    assert not empty.root.exists()
    saved.write_bytes(data)
    files.load_cache_file(saved, empty)


def test_flipped_bytes_under_a_digest_that_fits_are_refused_in_words_or_harmless(files, saved, empty):
    """The file as somebody with a hex editor could send it: any error but ours would stop the prompt."""
    data, before = saved.read_bytes(), None
    for position in range(len(data) - 64):
        flipped = bytearray(data)
        flipped[position] ^= 0x1C if position % 2 else 0x81
        saved.write_bytes(flipped)
        sealed(saved)
        try:
            files.load_cache_file(saved, empty)
        except files.CacheFileError:
            continue
        before = before or contents(empty.root)
        assert contents(empty.root) == before, position


def test_a_part_of_a_file_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        assert "only a part" in refused(files, saved, empty)
    saved.write_bytes(data + b"x")
    refused(files, saved, empty)


def test_the_helper_makes_files_that_load(files, saved, empty):
    rewritten(saved, extra=[f"{NAMES[0]}/extra"])
    files.load_cache_file(saved, empty)
    assert (empty.root / NAMES[0] / "extra").exists()


@pytest.mark.parametrize("key", ["torch", "triton", "cuda", "python", "platform", "device", "comfy-kitchen"])
def test_another_machine_is_refused_with_both_values(files, disk_cache, saved, empty, key):
    rewritten(saved, **{key: "quite another"})
    assert f"{key} is {disk_cache.environment()[key]} here, quite another in the file" in refused(files, saved, empty)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", f"{NAMES[0]}/../../outside", "/tmp/outside", "outside", f"{NAMES[0]}/a/./b", f"{NAMES[0]}//b",
        f"{NAMES[0]}\\..\\outside", "C:/outside", f"{NAMES[0]}/.hidden", f"{NAMES[0]}/a\nb", f"{NAMES[0]}/b:c",
        "a" * 60_000,
    ],
    ids=lambda name: repr(name[:30]),
)  # fmt: skip
def test_a_member_that_leads_elsewhere_is_refused(files, saved, empty, tmp_path, name):
    before = contents(tmp_path)
    rewritten(saved, extra=[name])
    assert "no file of a cache folder" in refused(files, saved, empty)
    before.pop(saved.name)
    after = contents(tmp_path)
    after.pop(saved.name)
    assert after == before and not Path("/tmp/outside").exists()


def test_a_file_of_the_format_before_is_loaded(files, saved, empty):
    digests = dict.fromkeys(files.load_cache_file(saved, empty).members, "0" * 64)
    empty.clear()
    rewritten(saved, format="torch-compile-kit cache 3", members=digests)
    assert files.load_cache_file(saved, empty).members == list(digests)
    assert (empty.root / NAMES[0] / "aotautograd/ab/entry").read_bytes() == b"graph"


@pytest.mark.parametrize("made", [None, "torch-compile-kit cache 2", 7, ["torch-compile-kit cache 4"]])
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
        archive.writestr(f"{NAMES[0]}/about.json", "{}")
    sealed(saved)
    assert "in the file twice" in refused(files, saved, empty)


def test_nothing_compiled_is_no_file(files, cache, tmp_path):
    cache.enter(NAMES[0], "Block")
    cache.exit(NAMES[0])
    with pytest.raises(files.CacheFileError, match="Warmup"):
        files.write_cache_file(tmp_path / "none.tckcache", cache, [NAMES[0]], "0.1.0", [], [])
    assert not list(tmp_path.glob("*.tckcache*"))


def test_a_cache_that_is_cleared_while_it_is_saved_is_said(files, cache, tmp_path, monkeypatch):
    filled(cache, {"a": b"a", "b": b"b"})
    pack = files._pack

    def cleared(*args):
        cache.clear()
        return pack(*args)

    monkeypatch.setattr(files, "_pack", cleared)
    with pytest.raises(files.CacheFileError, match="cleared while it was saved"):
        files.write_cache_file(tmp_path / "gone.tckcache", cache, [NAMES[0]], "0.1.0", [], [])
    assert not list(tmp_path.glob("*.tckcache*")) and not list(tmp_path.glob("*.partial"))


def test_large_files_pass_through_little_memory(files, cache, empty, tmp_path):
    filled(cache, {"large": bytes(64 * MIB)})
    path = tmp_path / "large.tckcache"
    tracemalloc.start()
    try:
        files.write_cache_file(path, cache, [NAMES[0]], "0.1.0", [], [])
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        files.load_cache_file(path, empty)
        loaded = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 16 * MIB and loaded < 16 * MIB
    assert (empty.root / NAMES[0] / "large").stat().st_size == 64 * MIB
