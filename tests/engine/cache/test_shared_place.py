"""Where the shared cache is: what the user can say, and what is never said of it."""

import os
import socket

import pytest

SECRET = "a secret of more than sixteen characters"


@pytest.fixture
def shared(engine, monkeypatch):
    module = engine("cache.shared")
    monkeypatch.setattr(module._Configured, "where", ())
    monkeypatch.setattr(module._Configured, "cache", None)
    for name in module.FILES:
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def cache_of(shared, monkeypatch, tmp_path):
    """A function: the shared cache that the environment or files in tmp_path name."""

    def cache_of(place=None, key=SECRET):
        for name, value in zip(shared.FILES, (place, key), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        shared.configure(tmp_path)
        return shared._Configured.cache

    return cache_of


def write(file, text):
    file.write_text(f"{text}\n")
    file.chmod(0o600)


def test_without_a_key_it_is_off_and_says_why(cache_of, caplog):
    assert cache_of("redis://127.0.0.1/0", key=None) is None
    assert "must be signed" in caplog.text and "TORCH_COMPILE_KIT_SHARED_KEY" in caplog.text
    assert cache_of("redis://127.0.0.1/0", key="short") is None


def test_files_that_are_written_when_the_log_asks_are_read_without_a_restart(cache_of, tmp_path, caplog):
    key, address = tmp_path / "shared.key", tmp_path / "shared.address"
    assert cache_of(key=None) is None and not caplog.text
    write(address, tmp_path / "volume")
    for _run in range(2):
        assert cache_of(key=None) is None
    assert caplog.text.count(f"in {key} (mode 600)") == 1
    write(key, SECRET)
    cache = cache_of(key=None)
    assert cache.place == str(tmp_path / "volume") and cache_of(key=None) is cache


def test_the_environment_goes_before_the_file(cache_of, tmp_path):
    write(tmp_path / "shared.address", tmp_path / "file")
    assert cache_of(tmp_path / "environment").place == str(tmp_path / "environment")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes")
@pytest.mark.parametrize("name", ["shared.key", "shared.address"])
def test_a_file_that_others_can_read_is_refused(cache_of, tmp_path, caplog, name):
    write(tmp_path / "shared.key", SECRET)
    write(tmp_path / "shared.address", tmp_path / "volume")
    (tmp_path / name).chmod(0o640)
    for _run in range(2):
        assert cache_of(key=None) is None
    assert caplog.text.count(f"chmod 600 {tmp_path / name}") == 1
    (tmp_path / name).chmod(0o600)
    assert cache_of(key=None) is not None, "without a restart"


def test_a_missing_client_is_named_with_its_command(cache_of, shared, monkeypatch, caplog):
    monkeypatch.setattr(shared.importlib.util, "find_spec", lambda _name: None)
    assert cache_of("rediss://user:word@host:6379/0") is None
    assert "python -m pip install redis" in caplog.text and "word" not in caplog.text


@pytest.mark.parametrize("place", ["host:6379", "http://host/", "redis:///0", "relative/folder", "redis://host:port/0"])
def test_a_place_that_is_none_is_refused(cache_of, place, caplog):
    assert cache_of(place) is None
    assert "the shared cache is off" in caplog.text


@pytest.mark.parametrize("mark", ["", *"/?#[]@:%", "\u2100"])
@pytest.mark.parametrize("before", [":head", "user:head", "head", "user:00773", "00773"])
def test_no_part_of_a_password_is_in_the_log(cache_of, caplog, mark, before):
    """Also of one that is no part of a URL, which Python and the client quote when they cannot read it."""
    pytest.importorskip("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        cache = cache_of(f"redis://{before}{mark}tail@127.0.0.1:{probe.getsockname()[1]}/0")
        assert cache is None or cache.get("name") is None
    assert "the shared cache" in caplog.text
    assert not any(part in caplog.text for part in ("head", "00773", "tail"))
