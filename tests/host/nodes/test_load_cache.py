"""Loading a cache file in this process. Whole restarts are in test_cache_files.py."""

import os

import pytest

pytestmark = pytest.mark.host
NAME = "f" * 64


@pytest.fixture
def folder(tmp_path):
    """The pack's folder of a user with no files yet."""
    import folder_paths

    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path))
    made = tmp_path / "torch-compile-kit"
    made.mkdir(mode=0o700)
    yield made
    folder_paths.set_user_directory(before)


@pytest.fixture
def store(engine, folder, tmp_path, monkeypatch):
    """The store of this process; an entry of it becomes `mine.tckcache`, and is removed."""
    (tmp_path / "store").mkdir()
    store = engine("cache.code_store").CodeStore(tmp_path / "store", 2**20, b"k" * 32)
    files = engine("host.nodes.cache_files")
    monkeypatch.setattr(files, "open_users_store", lambda: store)
    store.put(NAME, b"graph")
    engine("cache.archive").write_cache_file(
        folder / "mine.tckcache", store, [NAME], [], files.pack_version(), ["Flux"], ["64x64 batch 1"]
    )
    store.clear()
    return store


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_what_others_could_have_written_is_said_and_not_loaded(engine, folder, store):
    load, file = engine("host.nodes.cache_files").load_cache, folder / "mine.tckcache"
    file.chmod(0o606)
    assert "not loaded" in load(file.name) and not [*store.entries()]
    file.chmod(0o600)
    assert load(file.name) == "mine.tckcache, for Flux; 64x64 batch 1; kinds of blocks: 1"
    assert store.get(NAME) == b"graph"


def test_a_file_that_is_not_in_the_folder_is_named(engine, folder):
    said = engine("host.nodes.cache_files").load_cache("other.tckcache")
    assert "'other.tckcache' is not in" in said and str(folder) in said
