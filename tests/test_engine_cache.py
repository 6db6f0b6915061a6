"""The cache on disk and the file it travels in: places, limits, and everything that a bad file can be."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NAMES = ["0" * 12, "1" * 12, "2" * 12]
MIB = 1024**2


@pytest.fixture
def disk_cache(engine):
    return engine("disk_cache")


@pytest.fixture
def cache(disk_cache, tmp_path):
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
    three.clear()
    assert (three.root / "notes" / "mine.txt").read_text() == "mine"


def test_usage_tells_what_lies_where(three):
    usage = three.usage()
    assert usage["folder"] == str(three.root) and usage["limit"] == 2 * MIB and usage["bytes"] > 3 * MIB
    assert [entry["name"] for entry in usage["entries"]] == NAMES[::-1]
    assert {entry["class"] for entry in usage["entries"]} == {"Block"}


@pytest.mark.parametrize(("given", "gib"), [("", 2), ("0.5", 0.5), ("0", 0), ("much", 2), ("-1", 2), ("inf", 2), ("nan", 2)])
def test_the_limit_can_be_set(disk_cache, monkeypatch, given, gib):
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE_GIB", given)
    assert disk_cache.limit_in_bytes() == int(gib * 1024**3)


def test_the_name_of_a_folder_depends_on_the_structure_alone(engine, disk_cache):
    from support import Net

    structure = engine("structure").structure_of
    first, second = Net(count=2).blocks
    assert disk_cache.folder_name("Block", structure(first)) == disk_cache.folder_name("Block", structure(second))
    others = [
        disk_cache.folder_name("Other", structure(first)),
        disk_cache.folder_name("Block", structure(Net(width=16).blocks[0])),
    ]
    assert len({*others, disk_cache.folder_name("Block", structure(first))}) == 3


def test_a_choice_is_recalled(cache):
    assert cache.recall(NAMES[0], "attention") is None
    cache.remember(NAMES[0], "Net", "attention", "cudnn")
    assert cache.recall(NAMES[0], "attention") == "cudnn"


@pytest.fixture
def files(engine):
    return engine("cache_file")


@pytest.fixture
def saved(files, cache, tmp_path):
    """A small cache, and the file that was made of it."""
    cache.enter(NAMES[0], "Block")
    cache.exit(NAMES[0])
    for name, content in {
        "aotautograd/ab/entry": b"graph",
        "ab/abc.best_config": b"",
        "triton/x/k.cubin": b"k",
        "locks/a.lock": b"",
    }.items():
        file = cache.root / NAMES[0] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    path = tmp_path / "mine.safetensors"
    assert files.write_cache_file(path, cache, [NAMES[0]], "0.1.0", ["Flux"], ["64x64 batch 1"]) == 3
    return path


@pytest.fixture
def empty(disk_cache, tmp_path):
    return disk_cache.DiskCache(tmp_path / "empty", MIB)


def contents(root):
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_what_is_saved_is_loaded(files, disk_cache, saved, empty):
    found = files.load_cache_file(saved, empty)
    assert (found.models, found.sizes, found.pack) == (["Flux"], ["64x64 batch 1"], "0.1.0")
    assert found.environment == disk_cache.environment()
    loaded = contents(empty.root)
    assert loaded[f"{NAMES[0]}/aotautograd/ab/entry"] == b"graph" and loaded[f"{NAMES[0]}/ab/abc.best_config"] == b""
    assert set(loaded) == set(found.members) and not any("triton" in name for name in loaded)


def test_the_header_tells_where_it_fits(saved, disk_cache):
    with safe_open(saved, framework="pt") as file:
        header = file.metadata()
    assert header["models"] == '["Flux"]' and header["sizes"] == '["64x64 batch 1"]'
    known = {"torch", "triton", "cuda", "python", "platform", "device", "code of the pack"}
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


def test_a_part_of_a_file_is_refused(files, saved, empty):
    data = saved.read_bytes()
    for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        with pytest.raises(files.CacheFileError, match=r"only a part|damaged"):
            files.load_cache_file(saved, empty)
    saved.write_bytes(data + b"x")
    with pytest.raises(files.CacheFileError):
        files.load_cache_file(saved, empty)
    assert not empty.root.exists()


def rewritten(files, path, members=(), **changes):
    """The file with another header or other members, and digests that fit: what someone could send."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    digests = json.loads(header["members"])
    for name in members:
        tensors[name] = torch.zeros(1, dtype=torch.uint8)
        digests[name] = files.hashlib.sha256(b"\0").hexdigest()
    save_file(tensors, path, header | {"members": json.dumps(digests), "sha256": "0" * 64} | changes)
    files._write_digest(path)


def test_the_helper_makes_files_that_load(files, saved, empty):
    rewritten(files, saved, members=[f"{NAMES[0]}/extra"])
    files.load_cache_file(saved, empty)
    assert (empty.root / NAMES[0] / "extra").exists()


@pytest.mark.parametrize("key", ["torch", "triton", "cuda", "python", "platform", "device"])
def test_another_machine_is_refused_with_both_values(files, disk_cache, saved, empty, key):
    rewritten(files, saved, **{key: "quite another"})
    with pytest.raises(files.CacheFileError) as refused:
        files.load_cache_file(saved, empty)
    assert f"{key} is {disk_cache.environment()[key]} here, quite another in the file" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", f"{NAMES[0]}/../../outside", "/tmp/outside", "outside", f"{NAMES[0]}/a/./b", f"{NAMES[0]}//b",
        f"{NAMES[0]}\\..\\outside", "C:/outside", f"{NAMES[0]}/.hidden", f"{NAMES[0]}/a\nb", f"{NAMES[0]}/", f"{NAMES[0]}/b:c",
    ],
)  # fmt: skip
def test_a_member_that_leads_elsewhere_is_refused(files, saved, empty, tmp_path, name):
    before = contents(tmp_path)
    rewritten(files, saved, members=[name])
    with pytest.raises(files.CacheFileError, match="no file of a cache folder"):
        files.load_cache_file(saved, empty)
    before.pop(saved.name)
    after = contents(tmp_path)
    after.pop(saved.name)
    assert after == before and not Path("/tmp/outside").exists()


@pytest.mark.parametrize("header", [None, {"format": "pt"}, {"format": "torch-compile-kit cache 1"}])
def test_another_kind_of_file_is_refused(files, empty, tmp_path, header):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, path, header)
    with pytest.raises(files.CacheFileError, match=r"format is .*torch-compile-kit cache 2"):
        files.load_cache_file(path, empty)


@pytest.mark.parametrize("key", ["members", "pack", "torch", "modules"])
def test_an_incomplete_header_is_refused(files, saved, empty, key):
    with safe_open(saved, framework="pt") as file:
        header = {k: v for k, v in file.metadata().items() if k != key} | {"sha256": "0" * 64}
    save_file(load_file(saved), saved, header)
    files._write_digest(saved)
    with pytest.raises(files.CacheFileError, match="incomplete"):
        files.load_cache_file(saved, empty)


def test_nothing_compiled_is_no_file(files, cache, tmp_path):
    cache.enter(NAMES[0], "Block")
    cache.exit(NAMES[0])
    with pytest.raises(files.CacheFileError, match="Warmup"):
        files.write_cache_file(tmp_path / "none.safetensors", cache, [NAMES[0]], "0.1.0", [], [])
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("torch._inductor.hooks", True), ("triton.runtime.cache", True), ("torch", False), ("sitecustomize", False),
        ("torchx.y", False), ("torch._inductor.runtime.compile_tasks.c123", False), ("torch..a", False),
    ],
)  # fmt: skip
def test_only_pytorchs_own_modules_are_imported_by_record(engine, name, imported):
    assert bool(engine("prepare")._LATE.fullmatch(name)) is imported


def test_sources_travel_by_the_names_of_their_modules(engine, cache, monkeypatch):
    prepare = engine("prepare")
    cache.root.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(prepare, "current", lambda: cache)
    prepare._record(prepare.SOURCES, {json.__file__, "/elsewhere/gone.py"})
    monkeypatch.setitem(sys.modules, "/home/somebody/custom_nodes/pack", json)
    assert "json" in prepare.traced_modules() and not any("/" in name for name in prepare.traced_modules())
    (cache.root / prepare.SOURCES).unlink()
    prepare.expect_modules(["json", "a_module.that_is_not_here", "builtins"])
    assert prepare._recorded(prepare.SOURCES) == {json.__file__}


def test_it_knows_whether_this_machine_has_compiled_as_it_is_now(engine, cache, monkeypatch):
    disk = engine("disk_cache")
    assert not cache.has_current()
    cache.enter(NAMES[0], "Block")
    cache.exit(NAMES[0])
    assert cache.has_current()
    another = {**disk.environment(), "torch": "9.9"}
    monkeypatch.setattr(disk, "environment", lambda: another)
    assert not cache.has_current()
