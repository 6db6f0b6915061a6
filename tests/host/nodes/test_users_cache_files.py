"""Cache files in the user's folder: whose folder it may be, and how a file may be called."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.host
NAME = "5" * 12


@pytest.fixture
def kit(tmp_path):
    """The pack's folder of a user who has none yet."""
    import folder_paths

    before = folder_paths.get_user_directory()
    folder_paths.set_user_directory(str(tmp_path / "user"))
    yield Path(folder_paths.get_user_directory()) / "torch-compile-kit"
    folder_paths.set_user_directory(before)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_cache_file_in_a_folder_that_others_may_write_is_not_loaded(engine, kit, tmp_path):
    files = engine("host.nodes.cache_files")
    cache = engine("cache.disk").DiskCache(tmp_path / "another machine's", 2**20)
    cache.enter(NAME, "Block")
    cache.exit(NAME)
    (cache.root / NAME / "entry").write_bytes(b"graph")
    engine("cache.archive").write_cache_file(kit / "mine.tckcache", cache, [NAME], "0.1.0", ["Flux"], ["64x64 batch 1"])
    kit.chmod(0o770)
    report = files.load_cache("mine.tckcache")
    assert "not loaded" in report and f"others may write into {kit} " in report
    kit.chmod(0o700)
    assert files.load_cache("mine.tckcache") == "mine.tckcache: 2 files for Flux; 64x64 batch 1"


@pytest.mark.parametrize("name", ["CON", "nul.tckcache", "com1", "aux.txt"])
def test_the_name_of_a_device_is_no_name_of_a_cache_file(engine, name):
    with pytest.raises(engine("errors").InvalidSetting, match="the name of a device on Windows"):
        engine("host.nodes.cache_files").plain_name(name)
    assert engine("host.nodes.cache_files").plain_name(f"_{name}") == f"_{name.removesuffix('.tckcache')}"
