"""Where the shared cache is: what the user can say, and what is never said of it."""

import os
import socket

import pytest
from redis_servers import SECRET


def write(file, text):
    file.write_text(f"{text}\n")
    file.chmod(0o600)


def test_without_a_key_it_is_off_and_says_why(configure, caplog):
    assert configure("redis://127.0.0.1/0", key=None) is None
    assert "must be signed" in caplog.text and "TORCH_COMPILE_KIT_SHARED_KEY" in caplog.text
    assert configure("redis://127.0.0.1/0", key="short") is None


def test_files_that_are_written_when_the_log_asks_are_read_without_a_restart(configure, tmp_path, caplog):
    key, address = tmp_path / "shared.key", tmp_path / "shared.address"
    assert configure(key=None) is None and not caplog.text
    write(address, tmp_path / "volume")
    for _run in range(2):
        assert configure(key=None) is None
    assert caplog.text.count(f"in {key} (mode 600)") == 1
    write(key, SECRET)
    cache = configure(key=None)
    assert cache.place == str(tmp_path / "volume") and configure(key=None) is cache


def test_the_environment_goes_before_the_file(configure, tmp_path):
    write(tmp_path / "shared.address", tmp_path / "file")
    assert configure(tmp_path / "environment").place == str(tmp_path / "environment")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes")
@pytest.mark.parametrize("name", ["shared.key", "shared.address"])
def test_a_file_that_others_can_read_is_refused(configure, tmp_path, caplog, name):
    write(tmp_path / "shared.key", SECRET)
    write(tmp_path / "shared.address", tmp_path / "volume")
    (tmp_path / name).chmod(0o640)
    for _run in range(2):
        assert configure(key=None) is None
    assert caplog.text.count(f"chmod 600 {tmp_path / name}") == 1
    (tmp_path / name).chmod(0o600)
    assert configure(key=None) is not None, "without a restart"


def test_a_missing_client_is_named_with_its_command(configure, shared, monkeypatch, caplog):
    monkeypatch.setattr(shared.importlib.util, "find_spec", lambda _name: None)
    assert configure("rediss://user:word@host:6379/0") is None
    assert "python -m pip install redis" in caplog.text and "word" not in caplog.text


@pytest.mark.parametrize("place", ["host:6379", "http://host/", "redis:///0", "relative/folder", "redis://host:port/0"])
def test_a_place_that_is_none_is_refused(configure, place, caplog):
    assert configure(place) is None
    assert "the shared cache is off" in caplog.text


@pytest.mark.parametrize("mark", ["", *"/?#[]@:%", "\u2100"])
@pytest.mark.parametrize("before", [":head", "user:head", "head", "user:00773", "00773"])
def test_no_part_of_a_password_is_in_the_log(configure, caplog, mark, before):
    """Also of one that is no part of a URL, which Python and the client quote when they cannot read it."""
    pytest.importorskip("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        cache = configure(f"redis://{before}{mark}tail@127.0.0.1:{probe.getsockname()[1]}/0")
        assert cache is None or cache.get("name") is None
    assert "the shared cache" in caplog.text
    assert not any(part in caplog.text for part in ("head", "00773", "tail"))
