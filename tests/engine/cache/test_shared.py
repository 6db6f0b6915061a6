"""The shared cache: what a worker takes from it, what it refuses, and that it never costs an image."""

import contextlib
import errno
import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from redis_servers import SECRET, Proxy, RedisServer, free_port
from support import CompiledNet, Net, NoCompiler, Plain

from devtools.server import wait_until

NAME, PREFIX = "0" * 64, "torch-compile-kit:"


@pytest.fixture
def stores(engine):
    return engine("cache.stores")


@pytest.fixture
def process(engine, monkeypatch):
    monkeypatch.setattr(engine("background.thread"), "RETRY_SECONDS", 0.1)
    return NoCompiler(engine, monkeypatch.setattr)


@pytest.fixture
def worker(engine, process, monkeypatch, tmp_path):
    """A function: a model as a process has it that starts with the store of that name."""
    nets, code_store = [], engine("cache.code_store")

    def worker(name):
        nets.clear()  # models with the same blocks share a group
        gc.collect()
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(code_store._Current, "store", code_store.CodeStore(tmp_path / name, 2**30, b"k" * 32))
        torch._dynamo.reset()
        torch.manual_seed(0)
        nets.append(CompiledNet(engine, Net(Plain), backend="inductor"))
        return nets[-1]

    return worker


def subfolder(place):
    return Path(place, "torch-compile-kit-shared")


def files_of(place):
    """What a shared cache in a folder has written, without the file that says whose the folder is."""
    return [file for file in subfolder(place).iterdir() if file.name != "about-this-folder.txt"]


X = torch.linspace(-1, 1, 16).view(2, 8)


@pytest.fixture
def images(process):
    """A function: the first image and one with code; both are what the uncompiled model makes. How many graphs that lowered."""

    def images(runs):
        before = process.lowered
        with torch.inference_mode():
            expected = runs.net(X)
            assert torch.equal(runs(X)[0], expected)
            runs.wait()
            result, uncompiled = runs(X)
            assert not uncompiled and not runs.failures and torch.equal(result, expected)
        return process.lowered - before

    return images


def test_worker_two_compiles_nothing(configure, images, worker, process, place):
    configure(place)
    assert images(worker("one")) == 1
    assert images(worker("two")) == 0 and process.loaded == 2


def test_what_was_shared_is_on_disk_when_the_server_is_gone(configure, images, worker, tmp_path):
    configure(tmp_path / "volume")
    images(worker("one"))
    images(worker("two"))
    configure(None)
    assert images(worker("two")) == 0


def test_what_cannot_be_loaded_is_compiled_anew_and_replaced_for_all(
    configure, images, worker, process, monkeypatch, engine, tmp_path, caplog
):
    """Code that was made by a worker whose PyTorch was damaged, say: its signature is right."""
    configure(tmp_path / "volume")
    images(worker("one"))
    load, traced_graph = process.load, engine("compile.traced_graph")
    outcomes = [lambda _code: 1 / 0]
    monkeypatch.setattr(traced_graph, "load", lambda code: (outcomes.pop() if outcomes else load)(code))
    assert images(worker("two")) == 1 and "cannot be loaded" in caplog.text and not outcomes
    assert images(worker("three")) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
def test_what_this_machine_has_no_room_for_is_not_the_fault_of_the_entry(
    configure, images, worker, process, monkeypatch, engine, tmp_path, number
):
    """The libraries of code are written to files, and those are opened."""
    configure(tmp_path / "volume")
    images(worker("one"))
    load, traced_graph = process.load, engine("compile.traced_graph")
    outcomes = [OSError(number, "no room")]

    def load_once(code):
        if outcomes:
            raise outcomes.pop()
        return load(code)

    monkeypatch.setattr(traced_graph, "load", load_once)
    runs, before = worker("two"), process.lowered
    with torch.inference_mode():
        assert torch.equal(runs(X)[0], runs.net(X))
        runs.wait()
        assert len(runs.failures) == 1 and process.lowered == before and not outcomes
        runs.new_run()
    assert images(runs) == 0


def test_a_changed_rewrite_is_a_miss(configure, images, worker, engine, tmp_path, monkeypatch):
    configure(tmp_path / "volume")
    images(worker("one"))
    environment = engine("cache.environment")
    monkeypatch.setitem(environment.LOADED, "code of the pack", "with another rewrite")
    environment.environment.cache_clear()
    try:
        assert images(worker("two")) == 1
    finally:
        environment.environment.cache_clear()


@pytest.mark.parametrize("at_once", [False, True])
def test_the_calling_thread_never_talks_to_the_server(configure, shared, images, worker, monkeypatch, tmp_path, at_once):
    configure(tmp_path / "volume")
    threads, original = set(), shared.SharedCache._try
    monkeypatch.setattr(
        shared.SharedCache, "_try", lambda *args, **kwargs: threads.add(threading.current_thread()) or original(*args, **kwargs)
    )
    for name in ("one", "two"):
        runs = worker(name)
        if at_once:
            with torch.inference_mode():
                assert torch.equal(runs.at_once(X), runs.net(X))
        else:
            images(runs)
    assert threads and threading.main_thread() not in threads


# One compiles, the others take it.


@pytest.fixture
def elsewhere(configure, stores, images, worker, tmp_path, monkeypatch):
    """Another worker holds the claim of the graph; a function that ends the other's compiling."""
    volume, claims, original = tmp_path / "volume", [], stores.FolderStore.claim
    cache = configure(volume)
    with monkeypatch.context() as recording:
        recording.setattr(stores.FolderStore, "claim", lambda store, name: claims.append(name) or original(store, name))
        images(worker("one"))
    contents = {file: file.read_bytes() for file in files_of(volume)}
    assert contents and not [file for file in contents if file.suffix == ".claim"]
    for file in contents:
        file.unlink()
    (name,) = claims
    name = name.removeprefix(PREFIX)
    assert cache.claim(name)
    configure(None)
    configure(volume)  # as another process, which has waited for nothing yet
    return lambda: [file.write_bytes(content) for file, content in contents.items()] and cache.release(name)


def test_another_worker_compiles_the_graph(elsewhere, worker, process):
    runs, before = worker("two"), process.lowered
    with torch.inference_mode():
        for _ in range(10):
            result, uncompiled = runs(X)
            assert uncompiled and torch.equal(result, runs.net(X)) and runs.is_being_compiled
            time.sleep(0.1)
        assert process.lowered == before
        elsewhere()
        runs.wait()
        result, uncompiled = runs(X)
        assert not uncompiled and torch.equal(result, runs.net(X))
    assert process.lowered == before and not runs.failures


def test_waiting_for_another_worker_is_no_failed_attempt(elsewhere, engine, worker, process, monkeypatch):
    monkeypatch.setattr(engine("background.thread"), "ATTEMPTS", 3)
    test_another_worker_compiles_the_graph(elsewhere, worker, process)


def is_postponed(runs):
    return any(job.due for group in runs._groups for job in group.code.jobs)


def test_a_call_that_waits_does_not_wait_for_another_worker(elsewhere, worker, process):
    runs, before = worker("two"), process.lowered
    with torch.inference_mode():
        assert torch.equal(runs.at_once(X), runs.net(X))
    assert process.lowered == before + 1


def test_a_graph_that_waits_for_another_worker_is_compiled_when_a_call_waits_for_it(elsewhere, worker, process):
    runs, before = worker("two"), process.lowered
    with torch.inference_mode():
        runs(X)
        wait_until(lambda: is_postponed(runs), "it waits")
        assert process.lowered == before
        assert torch.equal(runs.at_once(X), runs.net(X))
    assert process.lowered == before + 1


def test_a_graph_that_waits_for_another_worker_is_compiled_when_sampling_waits_for_all_graphs(
    elsewhere, worker, engine, process
):
    runs, compiler, before = worker("two"), engine("background.thread").compiler, process.lowered
    with torch.inference_mode():
        runs(X)
        wait_until(lambda: is_postponed(runs), "it waits")
        assert compiler.have_awaited() and compiler.wait(20) and process.lowered == before + 1
        result, uncompiled = runs(X)
        assert not uncompiled and torch.equal(result, runs.net(X))


def test_the_claim_of_a_worker_that_is_gone_ends(elsewhere, stores, images, worker, tmp_path):
    (claim,) = subfolder(tmp_path / "volume").glob("*.claim")
    os.utime(claim, (time.time() - stores.CLAIM_SECONDS - 1,) * 2)
    assert images(worker("two")) == 1


@pytest.fixture
def obtain(engine, process, worker):
    """A function: the code of a graph of one input, for a worker with a store of its own."""
    module, request = engine("compile_process.obtain"), engine("compile_process.obtain").Request

    def obtain(patient=True):
        worker("one")
        return module.obtain(request("text", NAME, (), torch.device("cpu")), "Block", patient)

    return obtain


def test_what_was_compiled_between_a_miss_and_the_claim_is_taken(configure, obtain, process, tmp_path, monkeypatch):
    cache = configure(tmp_path / "volume")
    claim, content = cache.claim, process.lower("of another worker").packed({"class": "Block", "environment": {}})
    monkeypatch.setattr(cache, "claim", lambda name: cache.put(name, content) and claim(name))
    code = obtain()
    assert code.was_kept and code.artefact == b"of another worker" and process.lowered == 1
    assert claim(NAME), "it was released"


@pytest.mark.parametrize("fails", [False, True])
def test_a_claim_is_held_while_a_graph_is_compiled_and_released(configure, obtain, engine, monkeypatch, place, fails):
    other, held = configure(place), []
    configure(None)
    configure(place)
    process = engine("compile_process.obtain").compile_process
    lower = process.lower

    def lower_or_fail(*request):
        held.append(not other.claim(NAME))
        return 1 / 0 if fails else lower(*request)

    monkeypatch.setattr(process, "lower", lower_or_fail)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        obtain()
    assert held == [True] and other.claim(NAME)


def test_a_claim_is_released_though_an_entry_could_not_be_put_in_time(configure, place, monkeypatch):
    one = configure(place)
    configure(None)
    other = configure(place)
    assert one.claim(NAME) and not other.claim(NAME)
    monkeypatch.setattr(one._store, "put", Mock(side_effect=TimeoutError))
    assert not one.put(NAME, b"content") and one.get(NAME) is None
    one.release(NAME)
    assert other.claim(NAME)


# Entries are code.


@pytest.fixture
def cache(configure, tmp_path):
    return configure(tmp_path / "volume")


def test_an_entry_that_others_could_have_written_is_a_miss_and_said_once(cache, configure, tmp_path, caplog):
    assert cache.get(NAME) is None and cache.put(NAME, b"content")
    file, other = cache._store._file(PREFIX + NAME), f"{NAME}2"
    good = file.read_bytes()
    for bad in (good[:-1], b"", b"content" * 10):
        file.write_bytes(bad)
        assert cache.get(NAME) is None
    cache._store._file(PREFIX + other).write_bytes(good)
    assert cache.get(other) is None, "of another name"
    assert caplog.text.count("damaged") == 1
    file.write_bytes(good)
    assert cache.get(NAME) == b"content"
    assert configure(tmp_path / "volume", SECRET + "2").get(NAME) is None, "of another key"
    assert caplog.text.count("damaged") == 2 and SECRET not in caplog.text


class Bomb:
    """What a pickle may be."""

    unpickled = 0

    def __reduce__(self):
        return _explode, ()


def _explode():
    Bomb.unpickled += 1


# The server is bad.


def poison(server):
    for name in server.entries():
        server.client.set(name, pickle.dumps(Bomb()) + bytes(64))


def fill(server):
    server.client.flushall()
    server.client.config_set("maxmemory", "1")


def make_read_only(server):
    server.client.flushall()
    server.client.replicaof("127.0.0.1", free_port())


BAD = {
    "killed": (lambda server: server.process.kill(), "does not answer"),
    "hung": (lambda server: server.process.send_signal(signal.SIGSTOP), "does not answer"),
    "full": (fill, "takes no entries"),
    "read-only": (make_read_only, "takes no entries"),
    "poisoned": (poison, "damaged"),
    "no password": (lambda server: server.client.config_set("requirepass", "x"), "does not answer"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_server_costs_no_image(configure, images, worker, how, caplog):
    spoil, said = BAD[how]
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        spoil(server)
        configure(None)
        configure(server.url)
        assert images(worker("two")) == 1
        assert images(worker("three")) == (0 if how == "poisoned" else 1)
    assert caplog.text.count(said) == 1 and Bomb.unpickled == 0


@pytest.mark.parametrize("kind", ["slow", "cut"])
def test_a_bad_network_costs_no_image(configure, images, worker, kind, caplog):
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        with Proxy(server.port, **({"delay": 0.3} if kind == "slow" else {"cut_after": 1000})) as proxy:
            configure(proxy.url)
            assert images(worker("two")) == (0 if kind == "slow" else 1)
    assert caplog.text.count("does not answer") == (kind == "cut")


def test_a_server_that_was_restarted_is_used_again(configure, shared, images, worker, monkeypatch):
    monkeypatch.setattr(shared, "OFF_SECONDS", 0.0)
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        server.__exit__()
        images(worker("two"))
        server.start()
        images(worker("three"))
        images(worker("four"))
        assert images(worker("five")) == 0


def test_a_server_that_takes_no_entries_still_gives_them(configure, images, worker):
    with RedisServer() as server:
        cache = configure(server.url)
        images(worker("one"))
        server.client.replicaof("127.0.0.1", free_port())
        assert not cache.put(NAME, b"content")
        assert images(worker("two")) == 0


def test_a_server_that_does_not_answer_is_left_alone_for_a_minute(configure, shared, monkeypatch, caplog):
    pytest.importorskip("redis", reason="redis-server is not installed: nor is its client for Python")
    cache = configure(f"redis://user:word@127.0.0.1:{free_port()}/0")
    connects, connect = [], cache._connect
    cache._connect = lambda: connects.append(1) or connect()
    now = time.monotonic()
    monkeypatch.setattr(shared.time, "monotonic", lambda: now)
    for _ in range(3):
        assert cache.get(NAME) is None and not cache.put(NAME, b"content") and cache.claim(NAME)
        monkeypatch.setattr(cache, "_store", None)
    assert len(connects) == 1
    now += shared.OFF_SECONDS + 1
    assert cache.get(NAME) is None and len(connects) == 2
    assert caplog.text.count("does not answer") == 1 and "word" not in caplog.text


def test_a_folder_in_which_a_write_hangs_is_left_alone_for_a_minute(cache, shared, monkeypatch, caplog):
    """From Python 3.11 on the error of the limit is an `OSError`, as is that of a folder that takes no entries."""
    assert cache.get(NAME) is None
    is_over = threading.Event()
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(shared.FolderStore, "put", lambda *_: is_over.wait(60))
    try:
        assert not cache.put(NAME, b"content") and cache._off_until > time.monotonic()
        cache._off_until = 0.0  # a minute later
        assert not cache.put(NAME, b"content") and cache._off_until > time.monotonic(), "an earlier request is not over"
    finally:
        is_over.set()
    assert "does not answer" in caplog.text and "takes no entries" not in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
def test_a_folder_that_hangs_costs_no_image(configure, shared, images, worker, tmp_path, monkeypatch, caplog):
    """Reading a FIFO waits until somebody writes into it."""
    monkeypatch.setattr(shared, "ANSWER_SECONDS", 0.2)
    configure(tmp_path / "volume")
    images(worker("one"))
    files = files_of(tmp_path / "volume")
    for file in files:
        file.unlink()
        os.mkfifo(file)
    configure(None)
    cache, answers, is_over = configure(tmp_path / "volume"), threading.Event(), threading.Event()

    def answer():
        is_over.wait(15)  # else the test, without a limit, would not end
        answers.set()
        while any(thread.name.startswith("torch-compile-kit") for thread in threading.enumerate()):
            for file in files:
                with contextlib.suppress(OSError):  # nobody reads it
                    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
            time.sleep(0.05)

    volume = threading.Thread(target=answer)
    volume.start()
    try:
        assert images(worker("two")) == 1 and not answers.is_set()
        cache._off_until = 0.0  # a minute later
        os.mkfifo(cache._store._file(PREFIX + NAME))
        files.append(cache._store._file(PREFIX + NAME))
        threads = threading.active_count()
        assert cache.get(NAME) is None and threading.active_count() == threads
        assert caplog.text.count("does not answer") == 1
    finally:
        is_over.set()
        volume.join()
