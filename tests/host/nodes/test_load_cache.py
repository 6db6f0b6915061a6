"""Loading a cache file in this process: whose folder it may come from. Whole restarts are in test_cache_files.py."""

import os
import shutil

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
def test_nothing_is_loaded_from_a_folder_that_others_may_write(engine, folder, cache, mode):
    load = engine("host.nodes.cache_files").load_cache
    folder.chmod(mode)
    said = load("mine.tckcache")
    assert "not loaded" in said and f"others may write into {folder} " in said and "chmod 700" in said
    assert not (cache.root / KIND).exists()
    folder.chmod(0o700)
    assert load("mine.tckcache") == "mine.tckcache: 2 files for Flux; 64x64 batch 1"  # with the kind's description
    assert (cache.root / KIND / "aotautograd" / "ab" / "entry").read_bytes() == b"graph"


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
