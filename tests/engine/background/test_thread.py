"""The worker thread and its queue, and what lowering on it leaves alone."""

import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from support import ROOT, CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def queue(engine):
    """The module, its queue empty before and afterwards."""
    module = engine("background.thread")
    assert module.compiler.wait(60)
    yield module
    assert module.compiler.wait(60)


class Owner:
    """Something that a job belongs to."""


def job(queue, action, owner=None, **more):
    owner = owner or test_jobs_run_in_order
    return queue.Job(weakref.ref(owner), action, torch.device("cpu"), **more)


def test_jobs_run_in_order(queue):
    done, go_on = [], threading.Event()
    jobs = [job(queue, lambda: go_on.wait(60)), *(job(queue, lambda n=n: done.append(n)) for n in range(3))]
    for one in jobs:
        queue.compiler.submit(one)
    assert queue.compiler.busy and not jobs[-1].over
    go_on.set()
    assert queue.compiler.wait(60) and done == [0, 1, 2] and all(one.over and one.error is None for one in jobs)


def test_a_job_that_somebody_waits_for_is_next(queue):
    done, go_on, polls = [], threading.Event(), []
    first, *others = [job(queue, lambda: go_on.wait(60)), *(job(queue, lambda n=n: done.append(n)) for n in range(3))]
    for one in (first, *others):
        queue.compiler.submit(one)
    queue.compiler.finish(others[-1], lambda: polls.append(go_on.set()))
    assert polls and others[-1].over and done[0] == 2
    assert queue.compiler.wait(60) and done == [2, 0, 1]


def test_code_that_only_has_to_be_read_waits_for_none_that_has_to_be_made(queue):
    done, go_on = [], threading.Event()
    first, *others = [job(queue, lambda: go_on.wait(60)), *(job(queue, lambda n=n: done.append(n)) for n in range(3))]
    assert not queue.compiler.makes_code
    others[1].is_kept, others[2].is_kept = False, True
    for one in (first, *others):
        queue.compiler.submit(one)
    assert queue.compiler.makes_code
    go_on.set()
    assert queue.compiler.wait(60) and done == [2, 0, 1] and not queue.compiler.makes_code


def test_a_poll_that_raises_ends_the_wait_and_not_the_job(queue):
    go_on = threading.Event()
    waiting = job(queue, lambda: go_on.wait(60))
    queue.compiler.submit(waiting)

    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.compiler.finish(waiting, cancel)
    assert not waiting.over
    go_on.set()
    assert queue.compiler.wait(60) and waiting.over and waiting.error is None


def test_a_job_whose_owner_is_gone_is_dropped(queue):
    done, go_on, owner = [], threading.Event(), Owner()
    queue.compiler.submit(job(queue, lambda: go_on.wait(60)))
    queue.compiler.submit(job(queue, lambda: done.append(1), owner))
    del owner
    go_on.set()
    assert queue.compiler.wait(60) and not done


def test_short_of_memory_it_is_tried_again_after_the_others(queue, monkeypatch):
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.01)
    done, go_on = [], threading.Event()

    def short():
        done.append("short")
        if len(done) < 4:
            raise torch.OutOfMemoryError("no memory")

    queue.compiler.submit(job(queue, lambda: go_on.wait(60)))
    tried = job(queue, short)
    queue.compiler.submit(tried)
    queue.compiler.submit(job(queue, lambda: done.append("other")))
    go_on.set()
    assert queue.compiler.wait(60) and done == ["short", "other", "short", "short"] and tried.error is None


def test_what_was_postponed_for_long_is_tried_again_when_memory_is_short(queue, monkeypatch):
    """Another worker compiles the graph for minutes, and the code is loaded beside a large image."""
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    errors = [*[queue.Postponed] * queue.ATTEMPTS, torch.OutOfMemoryError]

    def action():
        if errors:
            raise errors.pop(0)

    told = []
    queue.compiler.submit(job(queue, action, on_error=told.append))
    assert queue.compiler.wait(60) and not errors and not told


def test_a_postponed_job_that_is_submitted_once_more_is_queued_once(queue, monkeypatch):
    """The graph runs again, in another call, while the worker is about to postpone its job."""
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    attempts = []

    def action():
        attempts.append(1)
        if len(attempts) == 1:
            queue.compiler.submit(postponed)
            raise queue.Postponed

    postponed = job(queue, action)
    queue.compiler.submit(postponed)
    assert queue.compiler.wait(60) and postponed.over and len(attempts) == 2


def test_nothing_is_queued_when_the_process_ends(engine, queue, monkeypatch):
    monkeypatch.setattr(queue, "EXIT_SECONDS", 0.0)
    monkeypatch.setattr(queue, "RETRY_SECONDS", 0.0)
    compiler, begun, ends, attempts = queue.Compiler(), threading.Event(), threading.Event(), []

    def action():
        begun.set()
        attempts.append(ends.wait(60))
        raise queue.Postponed

    running, late = job(queue, action), job(queue, lambda: attempts.append("late"))
    compiler.submit(running)
    assert begun.wait(60)
    compiler.stop()
    ends.set()
    compiler.submit(late)
    compiler.finish(late, lambda: None)
    assert compiler.wait(60) and running.over and late.over and attempts == [True]


def test_who_waits_is_told_at_once_that_memory_is_short(queue):
    def short():
        raise torch.OutOfMemoryError("no memory")

    told = []
    waiting = job(queue, short, on_error=lambda error: told.append(type(error)))
    go_on = threading.Event()
    queue.compiler.submit(job(queue, lambda: go_on.wait(60)))
    queue.compiler.submit(waiting)
    queue.compiler.finish(waiting, go_on.set)
    assert waiting.attempts == 1 and told == [torch.OutOfMemoryError]


def test_an_error_ends_one_job(queue):
    done, told = [], []
    queue.compiler.submit(job(queue, lambda: 1 / 0, on_error=told.append))
    queue.compiler.submit(job(queue, lambda: done.append(1)))
    assert queue.compiler.wait(60) and done == [1] and [type(e) for e in told] == [ZeroDivisionError]


def test_an_error_that_nobody_asks_for_is_logged(queue, caplog):
    queue.compiler.submit(job(queue, lambda: 1 / 0))
    assert queue.compiler.wait(60)
    (record,) = (r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError)
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("what", ["the import of the compiler", "loading code"])
def test_beside_seconds_of_python_others_get_their_turn_at_once(engine, monkeypatch, what):
    """Else each operation of a model that loads its weights meanwhile waits for Python's five milliseconds."""
    obtain, before, seen = engine("compile_process.obtain"), sys.getswitchinterval(), []

    class Looked(Exception):
        """In place of PyTorch's compiler."""

        MissingName = Exception

        def __getattr__(self, name):
            seen.append(sys.getswitchinterval())
            raise self

    monkeypatch.setattr(obtain, "private", Looked())
    if what == "loading code":
        with pytest.raises(Looked):
            obtain.load(engine("compile_process.artefact").Code(b""))
    else:
        obtain._import()
    assert seen and max(seen) < before / 10 and sys.getswitchinterval() == before


def test_code_is_published_while_nothing_is_captured(engine, monkeypatch):
    """Kernels, which are loaded first, need the same lock; see tests/test_gpu.py."""
    traced, seen = engine("compile.traced_graph"), []
    net, x = CompiledNet(engine, Net()), torch.randn(2, 4, 8)
    go_on, loading = threading.Event(), threading.Event()

    def size_check(_guards, _at):
        seen.append([traced.gpu_locks[torch.device(device)].locked() for device in ("cpu", "cuda:0")])
        loading.set()
        assert go_on.wait(60)

    monkeypatch.setattr(traced, "_size_check", size_check)
    expected = net.net(x)
    net(x)
    assert loading.wait(60)
    result, uncompiled = net(x)
    assert uncompiled and torch.equal(result, expected)
    go_on.set()
    assert net.wait() == 1 and seen == [[True, False]] and not traced.gpu_locks[x.device].locked()
    assert not net(x)[1]


def test_code_runs_only_where_the_guards_of_its_lowering_hold(engine):
    """Lowering specialises sizes further than Dynamo does (divisible, in 32 bits, one larger than another)."""
    seen = []

    def backend(graph, inputs):
        """Code for sizes above 5, which is told as lowering does: by a guard on its fake inputs."""
        sizes = [size for tensor in inputs if isinstance(tensor, torch.Tensor) for size in tensor.shape]
        seen.append(all(size > 5 for size in sizes if isinstance(size, torch.SymInt) and "s" in str(size)))
        return graph.forward

    net = CompiledNet(engine, Net(), backend=backend)
    small, large = torch.randn(2, 4, 8), torch.randn(7, 9, 8)
    for x in (large, small, large, small, torch.randn(3, 4, 8), torch.randn(8, 8, 8)):
        result, _ = net(x)
        net.wait()
        assert torch.equal(result, net.net(x))
    assert seen == [True, False], "a graph for either kind of sizes"
    for x in (large, small):
        result, uncompiled = net(x)
        assert not uncompiled and torch.equal(result, net.net(x))
    assert net.graphs == 2


ENDS = """
import importlib, sys, types
sys.path.insert(0, sys.argv[1] + "/tests")
kit = types.ModuleType("kit")
kit.__path__ = [sys.argv[1]]
sys.modules["kit"] = kit
import torch
from support import CompiledNet, Net

def engine(name):
    return importlib.import_module(f"kit.engine.{name}")

with torch.inference_mode():
    net, x = CompiledNet(engine, Net(), backend="inductor"), torch.randn(2, 4, 8)
    assert net(x)[1]
print("over", engine("background.thread").compiler.busy)
"""


def test_a_process_that_ends_while_code_is_compiled_ends_well(tmp_path):
    """The interpreter would abort: a thread inside PyTorch that wants the GIL."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", ENDS, str(ROOT)], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0 and ended.stdout.strip() == "over True", ended.stderr[-2000:]
