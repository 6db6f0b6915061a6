"""Loading a cache file in this process: whose folder it may come from. Whole restarts are in test_cache_files.py."""

import os
from pathlib import Path

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
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_no_file_is_loaded_that_others_could_have_written(engine, folder, store, mode, monkeypatch):
    monkeypatch.setattr(engine("cache.folders"), "_private_group", lambda: None)
    load, file = engine("host.nodes.cache_files").load_cache, folder / "mine.tckcache"
    folder.chmod(mode)
    file.chmod(0o664)
    said = load(file.name)
    assert (
        "not loaded" in said and f"others could write {file}" in said and "take .untrusted off mine.tckcache.untrusted" in said
    )
    assert load(file.name) == said and not store.names(), "also at the next run"
    (folder / "mine.tckcache.untrusted").rename(file)  # the user knows it
    assert load(file.name) == "mine.tckcache: 1 kinds of blocks for Flux; 64x64 batch 1"
    assert store.get(NAME) == b"graph"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_file_is_loaded_that_only_the_users_own_group_could_have_written(engine, folder, store, monkeypatch):
    """As all files are that are copied there under Ubuntu's umask, 0002."""
    monkeypatch.setattr(engine("cache.folders"), "_private_group", lambda: folder.stat().st_gid)
    folder.chmod(0o775)
    (folder / "mine.tckcache").chmod(0o664)
    assert (
        engine("host.nodes.cache_files").load_cache("mine.tckcache")
        == "mine.tckcache: 1 kinds of blocks for Flux; 64x64 batch 1"
    )
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_on_a_drive_without_rights_a_file_is_loaded_and_what_is_checked_is_what_is_used(engine, folder, store, monkeypatch):
    """The user has put it there and chosen it; nobody can tell who has written it, and others could change it meanwhile."""
    archive, file = engine("cache.archive"), folder / "mine.tckcache"
    folder.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    checked = archive._checked

    def check_and_change(path):
        data = checked(path)
        file.write_bytes(b"theirs" * 100)
        return data

    monkeypatch.setattr(archive, "_checked", check_and_change)
    assert (
        engine("host.nodes.cache_files").load_cache("mine.tckcache")
        == "mine.tckcache: 1 kinds of blocks for Flux; 64x64 batch 1"
    )
    assert store.get(NAME) == b"graph"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_nothing_is_loaded_from_another_users_folder(engine, folder, store, monkeypatch):
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    said = engine("host.nodes.cache_files").load_cache("mine.tckcache")
    assert f"{folder} belongs to another user (uid {real}, this is {real + 1})" in said
    assert not store.names()


def test_a_file_that_is_not_in_the_folder_is_named(engine, folder):
    said = engine("host.nodes.cache_files").load_cache("other.tckcache")
    assert "'other.tckcache' is not in" in said and str(folder) in said
