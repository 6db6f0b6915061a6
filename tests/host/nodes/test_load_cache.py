"""Loading a cache file in this process: whose folder it may come from. Whole restarts are in test_cache_files.py."""

import os
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.host
KIND = "f" * 12


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
def cache(engine, folder):
    """The cache of this process; a file in it becomes `mine.tckcache`, and is removed."""
    found = engine("host.model.user_folder").open_users_cache()
    found.enter(KIND, "Block")
    found.exit(KIND)
    entry = found.root / KIND / "aotautograd" / "ab" / "entry"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"graph")
    files = engine("host.nodes.cache_files")
    engine("cache.archive").write_cache_file(
        folder / "mine.tckcache", found, [KIND], files.pack_version(), ["Flux"], ["64x64 batch 1"]
    )
    shutil.rmtree(found.root / KIND)
    yield found
    shutil.rmtree(found.root / KIND, ignore_errors=True)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_no_file_is_loaded_that_others_could_have_written(engine, folder, cache, mode, monkeypatch):
    monkeypatch.setattr(engine("cache.folders"), "_private_group", lambda: None)
    load, file = engine("host.nodes.cache_files").load_cache, folder / "mine.tckcache"
    folder.chmod(mode)
    file.chmod(0o664)
    said = load(file.name)
    assert (
        "not loaded" in said and f"others could write {file}" in said and "take .untrusted off mine.tckcache.untrusted" in said
    )
    assert load(file.name) == said and not (cache.root / KIND).exists(), "also at the next run"
    (folder / "mine.tckcache.untrusted").rename(file)  # the user knows it
    assert load(file.name) == "mine.tckcache: 2 files for Flux; 64x64 batch 1"  # with the kind's description
    assert (cache.root / KIND / "aotautograd" / "ab" / "entry").read_bytes() == b"graph"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_file_is_loaded_that_only_the_users_own_group_could_have_written(engine, folder, cache, monkeypatch):
    """As all files are that are copied there under Ubuntu's umask, 0002."""
    monkeypatch.setattr(engine("cache.folders"), "_private_group", lambda: folder.stat().st_gid)
    folder.chmod(0o775)
    (folder / "mine.tckcache").chmod(0o664)
    assert engine("host.nodes.cache_files").load_cache("mine.tckcache") == "mine.tckcache: 2 files for Flux; 64x64 batch 1"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_on_a_drive_without_rights_what_is_checked_is_a_private_copy(engine, folder, cache, monkeypatch):
    """Nobody can tell there who has written a file: the user has put it there and chosen it."""
    files, seen = engine("host.nodes.cache_files"), []
    real = files.load_cache_file
    folder.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    monkeypatch.setattr(
        files,
        "load_cache_file",
        lambda path, into: (seen.append((path, path.parent.stat().st_mode & 0o777)), real(path, into))[1],
    )
    assert files.load_cache("mine.tckcache") == "mine.tckcache: 2 files for Flux; 64x64 batch 1"
    ((used, mode),) = seen
    assert used.parent.parent == cache.root and mode == 0o700
    assert not used.parent.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_nothing_is_loaded_from_another_users_folder(engine, folder, cache, monkeypatch):
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    said = engine("host.nodes.cache_files").load_cache("mine.tckcache")
    assert f"{folder} belongs to another user (uid {real}, this is {real + 1})" in said
    assert not (cache.root / KIND).exists()


def test_a_file_that_is_not_in_the_folder_is_named(engine, folder):
    said = engine("host.nodes.cache_files").load_cache("other.tckcache")
    assert "'other.tckcache' is not in" in said and str(folder) in said
