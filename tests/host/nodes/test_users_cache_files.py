"""Cache files in the user's folder, in this process. Whole restarts are in test_cache_files.py."""

import os
import types
from pathlib import Path

import pytest
from torch import nn

pytestmark = pytest.mark.host
NAMES = ["5" * 64, "6" * 64]


@pytest.fixture
def kit(tmp_path):
    """The pack's folder of a user who has none yet."""
    import folder_paths

    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path / "user"))
    yield Path(folder_paths.get_user_directory()) / "torch-compile-kit"
    folder_paths.set_user_directory(before)


@pytest.fixture
def store(engine, tmp_path, monkeypatch):
    """Another machine's, with code in it."""
    code_store = engine("cache.code_store")
    (tmp_path / "store").mkdir()
    store = code_store.CodeStore(tmp_path / "store", 2**20, b"k" * 32)
    for name in NAMES:
        store.put(name, b"graph")
    monkeypatch.setattr(engine("host.nodes.cache_files"), "open_users_store", lambda: store)
    return store


def test_a_file_that_goes_while_the_folder_is_listed_is_left_out(engine, kit, monkeypatch):
    files = engine("host.nodes.cache_files")
    kit.mkdir(parents=True)
    for name in ("kept", "renamed"):
        (kit / f"{name}.tckcache").write_bytes(b"")
    is_file = Path.is_file

    def is_file_and_goes(path):
        found = is_file(path)
        if path.stem == "renamed":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", is_file_and_goes)
    assert files.cache_files() == ["kept.tckcache"]


class UNetModel(nn.Module):
    """Of SD 1.5, and of SDXL."""


def test_all_models_are_saved_though_two_are_of_one_class_and_a_file_without_sizes_is_told_without_a_comma(
    engine, kit, store, monkeypatch
):
    files, models = engine("host.nodes.cache_files"), []
    for number, name in enumerate(NAMES, 1):
        stats, code = engine("compile.session").CompileStats(graphs=2), types.SimpleNamespace(entries={name})
        group = types.SimpleNamespace(code=code, settings=engine("settings").CompileSettings(), stats=stats)
        network = UNetModel()
        network.layer = nn.Linear(number, 1)
        store.remember(engine("cache.structure").name_of(network), {"attention": f"kernel {number}"})
        models.append((network, types.SimpleNamespace(groups={"key": group}, title="")))
    monkeypatch.setattr(files, "live_models", lambda: models)
    assert files.save_all("mine").endswith(" MiB: UNetModel, UNetModel 2; kinds of blocks: 2")
    store.clear()
    assert files.load_cache("mine.tckcache") == "mine.tckcache, for UNetModel, UNetModel 2; kinds of blocks: 2"
    assert {*store.entries()} == set(NAMES)
    names = [engine("cache.structure").name_of(network) for network, _ in models]
    assert [store.choices(name) for name in names] == [{"attention": "kernel 1"}, {"attention": "kernel 2"}]


@pytest.mark.parametrize(
    ("backend", "graphs", "entries", "said"),
    [
        ("inductor", 0, (), "nothing has been compiled in this session yet"),
        ("aot_eager", 2, (), "backend aot_eager keeps nothing; set backend to inductor"),
        ("inductor", 2, (), "nothing is compiled yet; save it when the node says ready"),
    ],
)
def test_why_there_is_nothing_to_save(engine, kit, store, monkeypatch, backend, graphs, entries, said):
    files, stats = engine("host.nodes.cache_files"), engine("compile.session").CompileStats(graphs=graphs)
    settings = engine("settings").CompileSettings(backend=backend)
    group = types.SimpleNamespace(code=types.SimpleNamespace(entries=set(entries)), settings=settings, stats=stats)
    network = UNetModel()
    monkeypatch.setattr(files, "live_models", lambda: [(network, types.SimpleNamespace(groups={"key": group}, title="SDXL"))])
    with pytest.raises(engine("cache.archive").CacheFileError, match=said):
        files.save_all("mine")


def test_what_is_no_cache_file_of_the_folder_is_named(engine, kit):
    kit.mkdir(parents=True)
    (kit / "x.txt").touch()
    load = engine("host.nodes.cache_files").load_cache
    assert "'x.txt' is no cache file, whose name ends in .tckcache" in load("x.txt")
    assert f"'other.tckcache' is not in {kit}" in load("other.tckcache")
    for odd in (None, 7, "x" * 300, "a\0b"):  # as a switch may hand it on
        assert "not loaded" in load(odd)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_what_others_could_have_written_is_said_and_not_loaded(engine, kit, store):
    files, file = engine("host.nodes.cache_files"), kit / "mine.tckcache"
    kit.mkdir(mode=0o700, parents=True)
    sizes = ["64x64 batch 1"]
    engine("cache.archive").write_cache_file(file, store, NAMES[:1], [], files.pack_version(), ["Flux"], sizes)
    store.clear()
    file.chmod(0o606)
    assert "not loaded" in files.load_cache(file.name) and not [*store.entries()]
    before = files.state_of(file.name)
    file.chmod(0o600)
    assert files.state_of(file.name) != before, "ComfyUI would give the old answer again"
    assert files.load_cache(file.name) == "mine.tckcache, for Flux; 64x64 batch 1; kinds of blocks: 1"
    assert store.get(NAMES[0]) == b"graph"


def test_a_cache_that_may_keep_nothing_is_named(engine, kit, store):
    files, file = engine("host.nodes.cache_files"), kit / "mine.tckcache"
    kit.mkdir(mode=0o700, parents=True)
    engine("cache.archive").write_cache_file(file, store, NAMES[:1], [], files.pack_version(), ["Flux"], [])
    store.limit = 0
    assert "its limit is 0 GiB; raise it" in files.load_cache(file.name)


@pytest.mark.parametrize("name", ["con", "NUL", "Com1", "lpt9.tckcache", "aux.flux", "nul .x", "prn "])
def test_a_name_of_a_device_of_windows_is_refused(engine, name):
    """A file of that name cannot be opened there, or is lost: what is written to nul is gone without an error."""
    with pytest.raises(engine("errors").InvalidSetting, match="device of Windows"):
        engine("host.nodes.cache_files").plain_name(name)


@pytest.mark.parametrize("name", ["console", "null", "com10", "my nul", "flux.con", "con-1"])
def test_a_name_that_begins_like_a_device_is_a_name(engine, name):
    assert engine("host.nodes.cache_files").plain_name(f" {name}.tckcache") == name
