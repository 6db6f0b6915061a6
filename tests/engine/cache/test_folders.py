"""Folders that hold compiled code and files of it: what a killed process has left there."""

import os

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
