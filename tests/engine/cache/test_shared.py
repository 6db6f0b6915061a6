"""The shared cache: what a worker takes from it, what it refuses, and that it never costs an image."""

import contextlib
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from redis_servers import Proxy, RedisServer, free_port
from support import CompiledNet, Net, Plain
from torch._dynamo.utils import counters

from devtools.server import wait_until

SECRET = "a secret of more than sixteen characters"
NAME = "torch-compile-kit:0123456789ab:fx:key"


@pytest.fixture
def shared(engine, monkeypatch):
    module = engine("cache.shared")
    monkeypatch.setattr(module._Configured, "where", ())
    monkeypatch.setattr(module._Configured, "cache", None)
    for name in module.shared_place.FILES:
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def stores(engine):
    return engine("cache.stores")


@pytest.fixture
def configure(shared, monkeypatch, tmp_path):
    """A function: use the shared cache at a place with a key; what is None can be in files of tmp_path."""

    def configure(place=None, key=SECRET):
        for name, value in zip(shared.shared_place.FILES, (place, key), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        shared.configure(tmp_path)
        return shared._Configured.cache

    return configure


@pytest.fixture
def worker(engine, monkeypatch, tmp_path):
    """A function: a model as a process has it that starts with the cache folder of that name."""
    monkeypatch.setattr(engine("background.thread"), "RETRY_SECONDS", 0.1)
    nets = []

    def worker(name):
        nets.clear()  # models with the same blocks share a group
        gc.collect()
        disk = engine("cache.disk")
        monkeypatch.setattr(disk._Current, "cache", disk.DiskCache(tmp_path / name, 2**30))
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


class Compiled:
    """While it is open: the graphs that PyTorch has compiled, and those that it had from a cache."""

    def __enter__(self):
        self._before = Counter(counters["inductor"])
        return self

    @property
    def graphs(self):
        return counters["inductor"]["fxgraph_cache_miss"] - self._before["fxgraph_cache_miss"]

    @property
    def hits(self):
        return counters["inductor"]["fxgraph_cache_hit"] - self._before["fxgraph_cache_hit"]

    def __exit__(self, *_exc):
        pass


X = torch.linspace(-1, 1, 16).view(2, 8)


def images(runs):
    """The first image and one with compiled code; both must be what the uncompiled model makes."""
    with torch.inference_mode(), Compiled() as compiled:
        expected = runs.net(X)
        assert torch.equal(runs(X)[0], expected)
        runs.wait()
        result, uncompiled = runs(X)
        assert not uncompiled and not runs.failures and torch.equal(result, expected)
    return compiled


def test_worker_two_compiles_nothing(configure, worker, place):
    configure(place)
    assert images(worker("one")).graphs == 1
    before = counters["aot_autograd"]["autograd_cache_hit"]
    second = images(worker("two"))
    assert (second.graphs, second.hits) == (0, 1) and counters["aot_autograd"]["autograd_cache_hit"] == before + 1


def test_what_was_shared_is_on_disk_when_the_server_is_gone(configure, worker, tmp_path):
    configure(tmp_path / "volume")
    images(worker("one"))
    images(worker("two"))
    configure(None)
    before = counters["aot_autograd"]["autograd_cache_hit"]
    assert images(worker("two")).graphs == 0
    assert counters["aot_autograd"]["autograd_cache_hit"] == before + 1


def test_a_changed_rewrite_is_a_miss(configure, worker, engine, tmp_path, monkeypatch):
    configure(tmp_path / "volume")
    images(worker("one"))
    environment = engine("cache.environment")
    monkeypatch.setitem(environment.LOADED, "code of the pack", "with another rewrite")
    environment.environment.cache_clear()
    try:
        assert images(worker("two")).graphs == 1
    finally:
        environment.environment.cache_clear()


def test_settings_of_pytorch_are_as_before_and_other_threads_see_no_shared_cache(configure, shared, worker, tmp_path, engine):
    from torch._inductor.codecache import FxGraphCache

    configure(tmp_path / "volume")
    worker("one")
    before = vars(FxGraphCache)["get_remote_cache"], torch._inductor.config.fx_graph_remote_cache
    seen = []
    with shared.sharing("0123456789ab", False):
        seen.append(FxGraphCache.get_remote_cache())
        other = threading.Thread(target=lambda: seen.append(FxGraphCache.get_remote_cache()))
        other.start()
        other.join()
    assert seen[0] is not None and seen[1] is None
    assert (vars(FxGraphCache)["get_remote_cache"], torch._inductor.config.fx_graph_remote_cache) == before


@pytest.mark.parametrize("at_once", [False, True])
def test_the_calling_thread_never_talks_to_the_server(configure, shared, worker, monkeypatch, tmp_path, at_once):
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
def elsewhere(configure, stores, worker, tmp_path, monkeypatch):
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
    assert cache.claim(name)
    configure(None)
    configure(volume)  # as another process, which has waited for nothing yet
    return lambda: [file.write_bytes(content) for file, content in contents.items()] and cache.release(name)


def test_another_worker_compiles_the_graph(elsewhere, worker):
    runs = worker("two")
    with torch.inference_mode(), Compiled() as compiled:
        for _ in range(10):
            result, uncompiled = runs(X)
            assert uncompiled and torch.equal(result, runs.net(X)) and runs.is_being_compiled
            time.sleep(0.1)
        assert (compiled.graphs, compiled.hits) == (0, 0)
        elsewhere()
        runs.wait()
        result, uncompiled = runs(X)
        assert not uncompiled and torch.equal(result, runs.net(X))
    assert (compiled.graphs, compiled.hits) == (0, 1) and not runs.failures


def test_a_call_that_waits_does_not_wait_for_another_worker(elsewhere, shared, worker):
    runs = worker("two")
    with torch.inference_mode(), Compiled() as compiled:
        assert torch.equal(runs.at_once(X), runs.net(X))
    assert compiled.graphs == 1 and not shared._Configured.cache.waiting_since


def test_a_graph_that_waits_for_another_worker_is_compiled_when_a_call_waits_for_it(elsewhere, shared, worker):
    runs = worker("two")
    with torch.inference_mode(), Compiled() as compiled:
        runs(X)
        wait_until(lambda: shared._Configured.cache.waiting_since, "it waits")
        assert compiled.graphs == 0
        assert torch.equal(runs.at_once(X), runs.net(X))
    assert compiled.graphs == 1


def test_a_graph_that_waits_for_another_worker_is_compiled_when_sampling_waits_for_all_graphs(
    elsewhere, shared, worker, engine
):
    runs, compiler = worker("two"), engine("background.thread").compiler
    with torch.inference_mode(), Compiled() as compiled:
        runs(X)
        wait_until(lambda: shared._Configured.cache.waiting_since, "it waits")
        assert compiler.have_awaited() and compiler.wait(20) and compiled.graphs == 1
        result, uncompiled = runs(X)
        assert not uncompiled and torch.equal(result, runs.net(X))


def test_the_claim_of_a_worker_that_is_gone_ends(elsewhere, stores, worker, tmp_path):
    (claim,) = subfolder(tmp_path / "volume").glob("*.claim")
    os.utime(claim, (time.time() - stores.CLAIM_SECONDS - 1,) * 2)
    assert images(worker("two")).graphs == 1


def test_what_was_compiled_between_a_miss_and_the_claim_is_taken(configure, shared, tmp_path, monkeypatch):
    cache = configure(tmp_path / "volume")
    original = cache.claim
    monkeypatch.setattr(cache, "claim", lambda name: cache.put(name, b"content") and original(name))
    assert shared._Sharing(cache, "names", tmp_path, True).get(NAME) == b"content"


def test_nobody_waits_longer_than_a_claim_lasts(elsewhere, shared, stores, worker, monkeypatch):
    """Workers that fail one after the other each claim the graph anew."""
    monkeypatch.setattr(shared, "CLAIM_SECONDS", 1)
    monkeypatch.setattr(stores.FolderStore, "claim", lambda *_: False)
    assert images(worker("two")).graphs == 1


def test_waiting_for_another_worker_is_no_failed_attempt(elsewhere, engine, worker, monkeypatch):
    monkeypatch.setattr(engine("background.thread"), "ATTEMPTS", 3)
    test_another_worker_compiles_the_graph(elsewhere, worker)


def test_a_claim_is_released(configure, shared, place):
    cache = configure(place)
    sharing = shared._Sharing(cache, "names", Path("folder"), True)
    assert sharing.get(NAME) is None and not cache.claim(NAME)
    sharing.close()
    assert cache.claim(NAME)


# Entries are code.


@pytest.fixture
def cache(configure, tmp_path):
    return configure(tmp_path / "volume")


def test_an_entry_is_what_was_put(cache):
    assert cache.get(NAME) is None
    assert cache.put(NAME, b"content") and cache.get(NAME) == b"content"


def test_a_flipped_bit_is_a_miss(cache, caplog):
    cache.put(NAME, bytes(range(256)))
    file = cache._store._file(NAME)
    good, numbers = file.read_bytes(), random.Random(0)
    loaded = 0
    for position in numbers.sample(range(len(good) * 8), 200):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        file.write_bytes(bad)
        loaded += cache.get(NAME) is not None
    assert loaded == 0 and caplog.text.count("damaged") == 1
    file.write_bytes(good)
    assert cache.get(NAME) is not None


@pytest.mark.parametrize("change", ["other name", "other key", "cut", "empty", "unsigned"])
def test_a_forged_entry_is_a_miss(cache, configure, tmp_path, change, caplog):
    cache.put(NAME, b"content")
    file, other = cache._store._file(NAME), f"{NAME}2"
    if change == "other name":
        cache._store._file(other).write_bytes(file.read_bytes())
        assert cache.get(other) is None
    elif change == "other key":
        assert configure(tmp_path / "volume", SECRET + "2").get(NAME) is None
    else:
        file.write_bytes({"cut": file.read_bytes()[:-1], "empty": b"", "unsigned": b"content" * 10}[change])
        assert cache.get(NAME) is None
    assert caplog.text.count("damaged") == 1 and SECRET not in caplog.text


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
def test_a_bad_server_costs_no_image(configure, worker, how, caplog):
    spoil, said = BAD[how]
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        spoil(server)
        configure(None)
        configure(server.url)
        assert images(worker("two")).graphs == 1
        assert images(worker("three")).graphs == (0 if how == "poisoned" else 1)
    assert caplog.text.count(said) == 1 and Bomb.unpickled == 0


@pytest.mark.parametrize("kind", ["slow", "cut"])
def test_a_bad_network_costs_no_image(configure, worker, kind, caplog):
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        with Proxy(server.port, **({"delay": 0.3} if kind == "slow" else {"cut_after": 1000})) as proxy:
            configure(proxy.url)
            assert images(worker("two")).graphs == (0 if kind == "slow" else 1)
    assert caplog.text.count("does not answer") == (kind == "cut")


def test_a_server_that_was_restarted_is_used_again(configure, shared, worker, monkeypatch):
    monkeypatch.setattr(shared, "OFF_SECONDS", 0.0)
    with RedisServer() as server:
        configure(server.url)
        images(worker("one"))
        server.__exit__()
        images(worker("two"))
        server.start()
        images(worker("three"))
        images(worker("four"))
        assert images(worker("five")).graphs == 0


def test_a_server_that_takes_no_entries_still_gives_them(configure, worker):
    with RedisServer() as server:
        cache = configure(server.url)
        images(worker("one"))
        server.client.replicaof("127.0.0.1", free_port())
        assert not cache.put(NAME, b"content")
        assert images(worker("two")).graphs == 0


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
def test_a_folder_that_hangs_costs_no_image(configure, shared, worker, tmp_path, monkeypatch, caplog):
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
        assert images(worker("two")).graphs == 1 and not answers.is_set()
        cache._off_until = 0.0  # a minute later
        os.mkfifo(cache._store._file(NAME))
        files.append(cache._store._file(NAME))
        threads = threading.active_count()
        assert cache.get(NAME) is None and threading.active_count() == threads
        assert caplog.text.count("does not answer") == 1
    finally:
        is_over.set()
        volume.join()


# What the user sets.


def test_without_a_key_it_is_off_and_says_why(configure, caplog):
    assert configure("redis://127.0.0.1/0", key=None) is None
    assert "must be signed" in caplog.text and "TORCH_COMPILE_KIT_SHARED_KEY" in caplog.text
    assert configure("redis://127.0.0.1/0", key="short") is None


def test_choices_of_autotuning_are_shared(configure, shared, worker, engine, tmp_path):
    """On a GPU PyTorch measures kernels after the graph is compiled, and writes down which is the fastest."""
    cache = configure(tmp_path / "volume")
    written = {}
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "ab").mkdir(parents=True)
        sharing = shared._Sharing(cache, "names", folder, True)
        sharing.get(NAME)
        written[name] = [file.read_text() for file in folder.glob("ab/*.best_config")]
        if name == "one":
            (folder / "ab" / "abc.best_config").write_text('{"XBLOCK": 8}')
        sharing.close()
    assert written == {"one": [], "two": ['{"XBLOCK": 8}']}
