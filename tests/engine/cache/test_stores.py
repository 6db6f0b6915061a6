"""Redis and a folder as stores: claims, connections that break, clocks that are wrong, and files of others."""

import errno
import hashlib
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from redis_servers import Proxy, RedisServer

NAME = "torch-compile-kit:0123456789ab:fx:key"
DAY = 24 * 3600


@pytest.fixture
def stores(engine):
    return engine("cache.stores")


@pytest.fixture
def folder(stores, tmp_path):
    return stores.FolderStore(str(tmp_path))


@pytest.fixture(params=["redis", "folder"])
def two(request, stores, tmp_path):
    """Two workers with one place."""
    if request.param == "folder":
        yield [stores.FolderStore(str(tmp_path)) for _ in range(2)]
    else:
        with RedisServer() as server:
            yield [stores.RedisStore(server.url) for _ in range(2)]


def age(file, seconds):
    os.utime(file, (time.time() - seconds,) * 2)


def test_a_flipped_bit_is_no_signature(stores):
    key, numbers = b"k" * 32, random.Random(0)
    good = stores.signed(key, NAME, bytes(range(256)))
    assert stores.verified(key, NAME, good) == bytes(range(256))
    for position in numbers.sample(range(len(good) * 8), 200):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        assert stores.verified(key, NAME, bytes(bad)) is None, position


# Both kinds.


def test_what_one_puts_the_other_gets(two):
    one, other = two
    assert other.get(NAME) is None
    one.put(NAME, b"content")
    assert other.get(NAME) == b"content"


def test_a_claim_that_another_holds_by_now_is_not_released(two, stores, monkeypatch):
    """The first worker took longer than its claim lasts."""
    one, other = two
    monkeypatch.setattr(stores, "CLAIM_SECONDS", 1)
    assert one.claim(NAME)
    time.sleep(1.1)
    assert other.claim(NAME)
    monkeypatch.setattr(stores, "CLAIM_SECONDS", 120)
    one.release(NAME)
    assert not one.claim(NAME)
    other.release(NAME)
    assert one.claim(NAME)


def test_only_who_holds_a_claim_releases_it(two):
    one, other = two
    assert one.claim(NAME)
    other.release(NAME)
    assert not other.claim(NAME)
    one.release(NAME)
    assert other.claim(NAME)


# Redis.


def test_entries_have_a_time_to_live(stores):
    with RedisServer() as server:
        store = stores.RedisStore(server.url)
        store.put(NAME, b"content")
        store.claim(NAME)
        assert stores.KEPT_SECONDS - 60 < server.client.ttl(NAME) <= stores.KEPT_SECONDS
        assert 0 < server.client.ttl(f"{NAME}:claim") <= stores.CLAIM_SECONDS


@pytest.mark.parametrize("request_name", ["get", "put", "claim", "release"])
def test_a_connection_that_was_lost_is_made_anew(stores, request_name):
    with RedisServer() as server, Proxy(server.port) as proxy:
        store = stores.RedisStore(proxy.url)
        assert store.get(NAME) is None
        proxy.silence()
        getattr(store, request_name)(*((NAME, b"content") if request_name == "put" else (NAME,)))


def test_a_claim_whose_answer_was_lost_is_held(stores):
    """The client asks again."""
    with RedisServer() as server:
        store = stores.RedisStore(server.url)
        assert store.claim(NAME) and store.claim(NAME)
        assert not stores.RedisStore(server.url).claim(NAME)


# A folder.


def test_only_the_packs_own_subfolder_is_touched(stores, tmp_path):
    """Such as a model in Hugging Face's `blobs`, which has a name like that of an entry."""
    names = [hashlib.sha256(b"weights").hexdigest(), f"{'0a' * 16}.tmp", f"{'0' * 64}.claim", "notes.txt"]
    for name in names:
        (tmp_path / name).write_text("the user's")
        age(tmp_path / name, 60 * DAY)
    store = stores.FolderStore(str(tmp_path))
    store.put(NAME, b"content")
    assert store.claim(NAME) and store.get(NAME) == b"content"
    store.release(NAME)
    stores.FolderStore(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {*names, stores.FOLDER}
    assert all((tmp_path / name).read_text() == "the user's" for name in names)


def test_what_is_old_goes_if_it_is_an_entry(stores, folder, tmp_path):
    for name in (NAME, f"{NAME}2"):
        folder.put(name, b"content")
    left, mine = tmp_path / stores.FOLDER / f"{'0a' * 16}.tmp", tmp_path / stores.FOLDER / "notes.tmp"
    for file in (left, mine, folder._file(NAME)):
        file.touch()
        age(file, stores.KEPT_SECONDS + 60)
    again = stores.FolderStore(str(tmp_path))
    assert again.get(NAME) is None and again.get(f"{NAME}2") == b"content"
    assert mine.exists() and not left.exists()


@pytest.mark.parametrize("days", [-40, 40])
def test_a_clock_that_is_wrong_deletes_nothing(stores, folder, tmp_path, monkeypatch, days):
    """This machine's: what counts is the file server's."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + days * DAY)
    folder.put(NAME, b"content")
    assert folder.claim(NAME)
    again = stores.FolderStore(str(tmp_path))
    assert again.get(NAME) == b"content" and not again.claim(NAME)


def test_what_was_written_in_the_future_is_new(stores, folder, tmp_path):
    folder.put(NAME, b"content")
    age(folder._file(NAME), -400 * DAY)
    assert stores.FolderStore(str(tmp_path)).get(NAME) == b"content"


def test_a_claim_that_was_written_in_the_future_is_over(stores, folder, tmp_path):
    """By a file server whose clock was wrong: else nobody would ever compile the graph."""
    assert folder.claim(NAME)
    age(folder._file(NAME, "claim"), -400 * DAY)
    other = stores.FolderStore(str(tmp_path))
    assert other.claim(NAME) and not folder.claim(NAME)


def test_a_claim_that_cannot_be_looked_at_is_not_gone(folder, monkeypatch):
    assert folder.claim(NAME)
    claim, stat = folder._file(NAME, "claim"), Path.stat

    def broken(path, **options):
        if path == claim:
            raise OSError(errno.EIO, "broken")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", broken)
    with pytest.raises(OSError, match="broken"):
        folder.claim(NAME)


@pytest.mark.parametrize("kind", ["files", "file", "link"])
def test_a_subfolder_that_is_not_the_packs_is_refused(stores, tmp_path, kind):
    (tmp_path / "users").mkdir()
    place = tmp_path / stores.FOLDER
    if kind == "file":
        place.touch()
    elif kind == "files":
        place.mkdir()
        (place / "model.safetensors").touch()
    else:
        (tmp_path / "users" / stores.MARKER).touch()
        place.symlink_to(tmp_path / "users", target_is_directory=True)
        if not place.is_symlink():
            pytest.skip("this system makes no links")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError) as refused:
        stores.FolderStore(str(tmp_path))
    assert refused.value.errno == errno.EEXIST and sorted(tmp_path.rglob("*")) == before


def test_a_volume_whose_files_are_removed_by_age_stays_in_use(stores, folder, tmp_path):
    folder.put(NAME, b"content")
    for file in tmp_path.rglob(stores.MARKER):
        file.unlink()
    assert stores.FolderStore(str(tmp_path)).get(NAME) == b"content" and list(tmp_path.rglob(stores.MARKER))


def test_of_a_folder_with_many_entries_each_worker_checks_some(stores, folder, tmp_path, monkeypatch):
    """On a volume where a look at each takes time: a worker that starts would find no answer within its limit."""
    for n in range(20):
        folder.put(f"{NAME}{n}", b"content")
    looks = []
    monkeypatch.setattr(stores, "LOOKED_AT", 5)
    monkeypatch.setattr(stores, "_written", lambda file: looks.append(file) or time.time())
    stores.FolderStore(str(tmp_path))
    assert len(looks) == 5


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no modes")
def test_workers_of_other_users_can_read_what_is_in_a_folder(folder):
    before = os.umask(0o022)
    try:
        folder.put(NAME, b"content")
    finally:
        os.umask(before)
    assert folder._file(NAME).stat().st_mode & 0o044 == 0o044


def test_what_cannot_be_deleted_from_a_folder_is_left(stores, folder, tmp_path, monkeypatch):
    """What belongs to another user, in a folder with the sticky bit."""
    folder.put(NAME, b"content")
    assert folder.claim(NAME)
    for file, seconds in ((folder._file(NAME), stores.KEPT_SECONDS), (folder._file(NAME, "claim"), stores.CLAIM_SECONDS)):
        age(file, seconds + 60)

    def unlink(path, *_args, **_kwargs):
        raise PermissionError(errno.EPERM, "not yours", path)

    monkeypatch.setattr(Path, "unlink", unlink)
    other = stores.FolderStore(str(tmp_path))
    assert other.claim(NAME), "nobody holds a claim that is over"
    other.put(f"{NAME}2", b"content")
    assert other.get(f"{NAME}2") == b"content"


def test_a_failed_write_leaves_nothing_in_a_folder(stores, folder, tmp_path):
    folder._file(NAME).mkdir()
    with pytest.raises(OSError):
        folder.put(NAME, b"content")
    assert not list((tmp_path / stores.FOLDER).glob("*.tmp"))


def test_workers_that_start_at_once_make_one_subfolder(stores, tmp_path):
    with ThreadPoolExecutor(16) as workers:
        puts = [workers.submit(lambda: stores.FolderStore(str(tmp_path)).put(NAME, b"content")) for _ in range(16)]
    assert [put.exception() for put in puts] == [None] * 16


# What is said.


@pytest.mark.parametrize("error", [ValueError, ConnectionError, OSError])
def test_the_text_of_a_clients_exception_is_not_said(stores, error):
    try:
        try:
            raise error("redis://user:password@host")
        except error as cause:
            raise RuntimeError("password") from cause
    except RuntimeError as raised:
        assert stores.without_secrets(raised) == "RuntimeError"
    refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    assert stores.without_secrets(refused) == f"ConnectionRefusedError: {os.strerror(errno.ECONNREFUSED)}"


def test_a_volume_that_a_worker_only_reads_is_read(folder, stores, tmp_path, monkeypatch):
    folder.put(NAME, b"content")
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    assert stores.FolderStore(str(tmp_path)).get(NAME) == b"content"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
def test_a_full_volume_has_no_claim_that_nobody_releases(folder, tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.claim(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*/*.claim"))
