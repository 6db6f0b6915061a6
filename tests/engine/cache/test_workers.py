"""Triton kernels wait for the worker processes, only while a block of ours compiles."""

import types

import pytest
import torch
from support import CompiledNet, Net


@pytest.fixture
def async_compile():
    from torch._inductor import async_compile

    return async_compile


@pytest.fixture
def compiler(async_compile, monkeypatch):
    """AsyncCompile with the calls of `triton` and `wait_pool_ready` noted instead of made: here is no GPU to compile for."""
    calls = []

    def triton(self, name, _source, *_):
        self.use_process_pool()
        calls.append(name)

    monkeypatch.setattr(async_compile.AsyncCompile, "triton", triton)
    monkeypatch.setattr(async_compile.AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(async_compile.AsyncCompile, "use_process_pool", classmethod(lambda _cls: calls.append("start")))
    monkeypatch.setattr(async_compile.AsyncCompile, "wait_pool_ready", classmethod(lambda *_: calls.append("wait")))
    return async_compile.AsyncCompile, calls


def test_a_kernel_that_must_be_compiled_waits_and_one_from_disk_does_not(engine, compiler, async_compile, monkeypatch):
    cls, calls = compiler
    workers = engine("cache.workers")
    monkeypatch.setattr(workers, "start_workers", lambda: calls.append("begin"))
    before = cls.__dict__["triton"]
    with workers.kernel_scope.applied(compile=workers.waiting_compile()):
        cls().triton("first", "source", "cuda")
        monkeypatch.setattr(async_compile.CompiledTritonKernels, "get", staticmethod(lambda _source: object()))
        cls().triton("second", "source", "cuda")
        monkeypatch.setattr(cls, "_ready_future", object())  # they run: nothing is to be avoided
        cls().triton("third", "source", "cuda")
    assert calls == ["begin", "wait", "start", "first", "second", "start", "third"]
    assert cls.__dict__["triton"] is before


def test_workers_that_do_not_start_stop_nothing(engine, compiler, monkeypatch):
    cls, calls = compiler
    monkeypatch.setattr(cls, "wait_pool_ready", classmethod(lambda *_: 1 / 0))
    workers = engine("cache.workers")
    monkeypatch.setattr(workers, "start_workers", lambda: calls.append("begin"))
    with workers.kernel_scope.applied(compile=workers.waiting_compile()):
        cls().triton("only", "source", "cuda")
    assert calls == ["begin", "start", "only"]


def test_it_holds_only_while_a_block_compiles(engine, async_compile):
    seen, before = [], async_compile.AsyncCompile.__dict__["triton"]

    def backend(graph, _inputs):
        seen.append(async_compile.AsyncCompile.__dict__["triton"])
        return graph

    net, x = Net(), torch.randn(2, 4, 8)
    with torch.inference_mode():
        CompiledNet(engine, net, backend=backend).at_once(x)
    assert len(seen) == 1 and seen[0] is not before and hasattr(seen[0], "_waits")
    assert async_compile.AsyncCompile.__dict__["triton"] is before


@pytest.fixture
def starting(engine, compiler, async_compile, monkeypatch):
    """starting(count): starts the workers twice where PyTorch would use `count` of them; the jobs that they were given."""
    workers, (cls, calls) = engine("cache.workers"), compiler

    def start(count):
        jobs = []
        monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: None)
        monkeypatch.setattr(async_compile, "get_compile_threads", lambda: count)
        monkeypatch.setattr(cls, "process_pool", staticmethod(lambda: types.SimpleNamespace(submit=jobs.append)))
        workers.start_workers.cache_clear()
        for _ in range(2):
            workers.start_workers()
        assert calls == (["start"] if jobs else [])
        return jobs

    yield start
    workers.start_workers.cache_clear()


@pytest.mark.parametrize(("count", "jobs"), [(1, 0), (3, 3), (100, 12)])
def test_each_of_them_has_one_job_and_starting_them_twice_is_once(starting, count, jobs):
    assert len(starting(count)) == jobs


def test_what_they_import_is_there(starting):
    """A worker that fails says nothing, and its first kernel imports after all."""
    pytest.importorskip("triton")
    starting(2)[0]()
