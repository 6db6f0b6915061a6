"""Files are replaced whole, also while another process reads them, and a failure leaves nothing behind."""

import os
import threading

import pytest


@pytest.fixture
def files(engine, monkeypatch):
    module = engine("files")
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    return module


def test_a_file_that_is_read_is_replaced_when_the_reader_is_done(files, tmp_path, monkeypatch):
    file, refused, original = tmp_path / "about.json", [], os.replace
    monkeypatch.setattr(files, "READERS_BLOCK", True)

    def busy(source, target):
        if len(refused) < 3:
            refused.append(target)
            raise PermissionError
        original(source, target)

    monkeypatch.setattr(os, "replace", busy)
    files.write_whole(file, b"new")
    assert len(refused) == 3 and file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_read_is_removed_when_the_reader_is_done(files, tmp_path, monkeypatch):
    """Servers that start at once read the key by another name of the file (os.link)."""
    file, refused, original = tmp_path / "key.tmp", [], os.unlink
    file.touch()
    monkeypatch.setattr(files, "READERS_BLOCK", True)

    def busy(path, **options):
        if len(refused) < 3:
            refused.append(path)
            raise PermissionError
        original(path, **options)

    monkeypatch.setattr(os, "unlink", busy)
    files.remove_file(file)
    assert len(refused) == 3 and not file.exists()


def test_readers_never_see_half_a_file_nor_stop_a_writer(files, tmp_path):
    """On Windows a reader's open file cannot be replaced."""
    file, contents, seen = tmp_path / "about.json", [bytes([n]) * 50_000 for n in range(10)], set()
    file.write_bytes(contents[0])
    is_over = threading.Event()

    def read():
        while not is_over.is_set():
            seen.add(files.read_whole(file))
            is_over.wait(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for content in contents:
            files.write_whole(file, content)
    finally:
        is_over.set()
        reader.join()
    assert seen and seen <= set(contents) and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("readers_block", [False, True])
@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, KeyboardInterrupt])
def test_what_cannot_be_replaced_leaves_no_half_file(files, tmp_path, monkeypatch, error, readers_block):
    tries = []
    monkeypatch.setattr(files, "READERS_BLOCK", readers_block)

    def refuse(*_):
        tries.append(1)
        raise error

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(error):
        files.write_whole(tmp_path / "about.json", b"new")
    assert not list(tmp_path.iterdir()) and len(tries) == (files.TRIES if error is PermissionError and readers_block else 1)
