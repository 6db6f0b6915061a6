"""Folders that hold compiled code and files of it: what a killed process has left there, who else may write into them."""

import os
import types

import pytest

NAME = "0" * 12
LEFT = "torch-compile-kit-a1_b2c3d.partial"


def test_what_a_killed_save_has_left_beside_the_file_goes_with_the_next(engine, tmp_path):
    """Also where the file is written into another folder than the cache's, which is all that is trimmed."""
    cache = engine("cache.disk").DiskCache(tmp_path / "cache", 2**20)
    cache.enter(NAME, "Block")
    cache.exit(NAME)
    (cache.root / NAME / "entry").write_bytes(b"graph")
    there = tmp_path / "elsewhere"
    there.mkdir()
    for name in (LEFT, "torch-compile-kit-young234.partial", "mine.partial"):
        (there / name).write_text("left")
    for name in (LEFT, "mine.partial"):
        os.utime(there / name, (0, 0))
    engine("cache.archive").write_cache_file(there / "saved.tckcache", cache, [NAME], "0.1.0", [], [])
    assert {file.name for file in there.iterdir()} == {"torch-compile-kit-young234.partial", "mine.partial", "saved.tckcache"}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize(
    ("name", "gid", "members", "group_of_other", "private"),
    [
        ("me", 1234, [], 100, True),
        ("me", 1234, ["me"], 100, True),
        ("me", 1234, ["me", "other"], 100, False),
        ("me", 1234, [], 1234, False),
        ("users", 1234, [], 100, False),
        ("me", 0, [], 100, False),
    ],
)
def test_a_group_is_private_with_no_other_member(engine, monkeypatch, name, gid, members, group_of_other, private):
    import grp
    import pwd

    me = types.SimpleNamespace(pw_name="me", pw_gid=gid)
    other = types.SimpleNamespace(pw_name="other", pw_gid=group_of_other)
    monkeypatch.setattr(os, "getegid", lambda: gid)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, other])
    monkeypatch.setattr(grp, "getgrgid", lambda of: types.SimpleNamespace(gr_gid=of, gr_name=name, gr_mem=members))
    assert engine("cache.folders")._private_group() == (gid if private else None)
