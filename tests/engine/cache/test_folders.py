"""Folders that hold compiled code and files of it: what a killed process has left there, and who may write above them."""

import os

import pytest

NAME = "0" * 12


def test_what_a_killed_save_has_left_beside_the_file_goes_with_the_next(engine, tmp_path):
    """Also where the file is written into another folder than the cache's, which is all that is trimmed."""
    cache = engine("cache.disk").DiskCache(tmp_path / "cache", 2**20)
    cache.enter(NAME, "Block")
    cache.exit(NAME)
    (cache.root / NAME / "entry").write_bytes(b"graph")
    there = tmp_path / "elsewhere"
    there.mkdir()
    for name in ("torch-compile-kit-old.partial", "torch-compile-kit-young.partial", "mine.partial"):
        (there / name).write_text("left")
    for name in ("torch-compile-kit-old.partial", "mine.partial"):
        os.utime(there / name, (0, 0))
    engine("cache.archive").write_cache_file(there / "saved.tckcache", cache, [NAME], "0.1.0", [], [])
    assert {file.name for file in there.iterdir()} == {"torch-compile-kit-young.partial", "mine.partial", "saved.tckcache"}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_above_the_cache_that_others_may_write_is_said_and_not_used(engine, tmp_path, monkeypatch, caplog, mode):
    """They could put another folder in the cache's place."""
    disk = engine("cache.disk")
    monkeypatch.setattr(disk._Current, "opened", False)
    monkeypatch.setattr(disk._Current, "cache", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    above = tmp_path / "kit"
    (above / "cache").mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    assert disk.open_cache(above / "cache") is None
    assert f"others may write into {above} " in caplog.text and "chmod 700" in caplog.text
