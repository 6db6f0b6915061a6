"""The compile process as it is: it lowers graphs, and whatever happens to it costs an uncompiled block and a sentence."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock, call, mock_open

import pytest
import torch
from support import CompiledNet, Net

sys.path.append(str(Path(__file__).parent))
from forked import Forks
from misbehaving import Told

pytestmark = pytest.mark.usefixtures("inference_mode")
X = torch.randn(2, 4, 8)
PYTHON = sys.executable


def wait_until(true, what):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid):
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(other for child in children for other in descendants(child))]


class Process:
    """The compile process of these tests, and the folder of its orders."""

    def __init__(self, engine, folder):
        self.folder, self.client = folder, engine("compile_process.client")
        self.now = self.client.compile_process
        self.orders()

    def orders(self, *orders):
        """What it does while it lowers the next graphs, one after the other."""
        (self.folder / "orders").write_text("\n".join(orders))
        for file in ("begun", "go_on", "renamed"):
            (self.folder / file).unlink(missing_ok=True)

    def tell(self, name):
        (self.folder / name).touch()

    def begun(self):
        wait_until((self.folder / "begun").exists, "it lowers nothing")

    def refuse_to_start(self, monkeypatch):
        """A process that is started ends at once, until `sys.executable` is PYTHON again."""
        script = self.folder / "python"
        script.write_text("#!/bin/sh\necho no room >&2\nexit 7\n")
        script.chmod(0o755)
        self.end()
        monkeypatch.setattr(sys, "executable", str(script))

    def end(self):
        """As at the end of ComfyUI; the next graph gets a new one."""
        self.now.stop()
        self.forgive()
        self.now._running = None

    def forgive(self):
        """As if no process had ever failed to start."""
        self.now.refusal, self.now._unstarted = None, 0


@pytest.fixture(scope="module")
def forks():
    """In the place of the module `subprocess` that the client has, where processes can be forked."""
    if sys.platform != "linux":
        yield subprocess
        return
    started = Forks({**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_WORKER_START": "fork"})
    yield types.SimpleNamespace(**{**vars(subprocess), "Popen": started.Popen})
    started.close()


@pytest.fixture(scope="module")
def shared(engine, tmp_path_factory, forks):
    process = Process(engine, tmp_path_factory.mktemp("orders"))
    process.end()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.client, "subprocess", forks)
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patch.setattr(process.now, "modules", lambda: ["misbehaving"])
        patch.setenv("ORDERS", str(process.folder))
        yield process
        process.end()


@pytest.fixture
def process(shared, engine, monkeypatch):
    # Code that is kept is not asked for.
    monkeypatch.setattr(engine("cache.code_store")._Current, "opened", True)
    monkeypatch.setattr(engine("cache.code_store")._Current, "store", None)
    shared.orders()
    yield shared
    assert not (shared.folder / "orders").read_text().strip(), "it was not asked so often"
    shared.forgive()


@pytest.fixture
def net(engine, process):
    return CompiledNet(engine, Net(block=Told), backend="inductor")


def is_compiled(net):
    expected = net.net(X)
    result, uncompiled = net(X)
    return torch.allclose(result, expected, atol=1e-6) and not uncompiled and not net.failures


def first_call(net):
    """The call that traces; it goes on at once."""
    result, uncompiled = net(X)
    assert uncompiled and torch.equal(result, net.net(X))


def compile_beside(net):
    """Have the process lower the graph while calls go on; the number of graphs."""
    first_call(net)
    return net.wait()


def compile_another(net):
    """Have the process lower a graph that a call of another model waits for."""
    torch._dynamo.reset()
    other = CompiledNet(net.engine, Net(block=Told), backend="inductor")
    other.at_once(X)
    assert is_compiled(other)


def why_inline(net):
    return [group.code.why_inline for group in net._groups]


def test_a_graph_is_lowered_and_what_is_printed_goes_to_the_log(process, net, caplog):
    process.orders("print")
    with caplog.at_level(logging.DEBUG, "torch-compile-kit"):
        assert compile_beside(net) == 1 and is_compiled(net)
        wait_until(lambda: "noise on stderr" in caplog.text, "nothing is in the log")
    assert os.readlink(f"/proc/{process.now.pid}/fd/0") == os.devnull, "compilers get the pipe that a thread reads"
    said = [record for record in caplog.records if "noise" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.DEBUG] * 3
    assert process.now.is_ready and why_inline(net) == [None]
    assert os.getpriority(os.PRIO_PROCESS, process.now.pid) == 19


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this system does not divide its cores among sessions")
def test_the_process_has_a_small_share_of_busy_cores_but_while_somebody_waits(process, net):
    def share():
        return Path(f"/proc/{process.now.pid}/autogroup").read_text().split()[-2:]

    assert compile_beside(net) == 1
    assert share() == ["nice", "10"]
    compile_another(net)
    assert share() == ["nice", "0"]


@pytest.mark.parametrize(
    ("error", "refusals", "tries"), [(BlockingIOError, 4, 5), (BlockingIOError, 9, 5), (PermissionError, 9, 1)]
)
def test_a_share_that_linux_refuses_for_now_is_asked_for_again(engine, monkeypatch, error, refusals, tries):
    child, opened, clock = engine("compile_process.child"), mock_open(), Mock()
    opened().write.side_effect = [*[error] * refusals, None]
    monkeypatch.setattr(child, "open", opened, raising=False)
    monkeypatch.setattr(child, "time", clock, raising=False)
    child.take_share(7)
    assert opened().write.mock_calls == [call("7")] * tries
    assert all(pause == call(0.15) for pause in clock.sleep.mock_calls)


def test_ctrl_c_in_a_terminal_is_not_for_the_process(process, net):
    compile_beside(net)
    before = process.now.pid
    for pid in descendants(before):
        os.kill(pid, signal.SIGINT)
    compile_another(net)
    assert process.now.pid == before


ENDINGS = {
    "kill": "ended by signal 9",
    "stop": "did not answer",
    "exit": "ended with 3",
    "cut": "ended with 0",
    "lies": "cannot be read",
    "says nothing": "cannot be read",
    "lengths": "did not answer",
}
BRIEF = "kill", "cut", "lies"


@pytest.mark.parametrize("order", [n if n in BRIEF else pytest.param(n, marks=pytest.mark.rest) for n in ENDINGS])
def test_a_process_that_is_lost_costs_one_more(process, net, caplog, monkeypatch, order):
    monkeypatch.setattr(process.client, "SILENT_SECONDS", 3.0)
    process.now.start()
    before = process.now.started
    process.orders(order)
    assert compile_beside(net) == 1 and is_compiled(net)
    (said,) = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    assert ENDINGS[order] in said and said.endswith("Another one is started.")
    assert process.now.started == before + 1


class TestWorkers:
    """Those that it forks to compile kernels side by side."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def two(cls, shared):
        shared.end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
            yield
        shared.end()

    def test_they_work_though_they_are_forked_while_it_listens(self, process, net):
        """They compile kernels side by side; one that does nothing is not missed, as then they are compiled one by one."""
        process.orders("ask a worker")
        compile_beside(net)
        assert is_compiled(net)

    def test_a_crash_is_noticed_while_a_worker_keeps_the_pipe_open(self, process, net, caplog):
        """Workers that inductor has forked for kernels live on for up to a minute."""
        process.orders("hold", "")
        first_call(net)
        process.begun()
        first, *workers = descendants(process.now.pid)
        assert workers
        os.kill(first, signal.SIGKILL)
        net.wait()
        assert is_compiled(net) and "signal 9" in caplog.text and not any(map(is_alive, workers))

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who gets the children of a process that ended")
    def test_where_comfyui_is_the_first_process_of_a_container_none_of_the_workers_stays_a_zombie(self, process, net):
        """They are its children when the process has ended by idleness."""
        process.orders("ask a worker", "idle")
        compile_beside(net)
        pids = descendants(process.now.pid)
        assert len(pids) > 1
        become_reaper = functools.partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
        assert become_reaper(1) == 0
        try:
            compile_another(net)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are not reaped")
        finally:
            become_reaper(0)


def test_killed_from_outside_while_a_call_waits(process, net, caplog):
    process.orders("hold")
    with concurrent.futures.ThreadPoolExecutor(1) as executor:

        def waiting():
            with torch.inference_mode():
                return net.at_once(X)

        result = executor.submit(waiting)
        process.begun()
        os.kill(process.now.pid, signal.SIGKILL)
        assert torch.allclose(result.result(120), net.net(X), atol=1e-6)
    assert is_compiled(net) and "signal 9" in caplog.text


def test_lost_again_with_the_same_graph_it_is_given_up_until_the_next_run(process, net):
    process.orders("kill", "exit")
    compile_beside(net)
    (failure,) = net.failures
    assert "the compile process was lost: it ended with 3" in failure
    before = process.now.started
    assert torch.equal(net(X)[0], net.net(X))
    assert net.wait() == 1 and process.now.started == before, "no process more"
    net.new_run()
    net(X)
    net.wait()
    assert is_compiled(net) and process.now.started == before + 1


def test_a_graph_that_is_refused(process, net, caplog):
    process.orders("refuse")
    compile_beside(net)
    (failure,) = net.failures
    assert "no kernel for this" in failure and caplog.text.count(failure) == 1
    assert torch.equal(net(X)[0], net.net(X))


def test_no_memory_there_is_no_reason_to_give_up_for_good(process, net):
    process.orders("memory")
    compile_beside(net)
    (failure,) = net.failures
    assert "memory" in failure.lower() and process.now.pid is None, "a module that could not be imported stays broken"
    net.new_run()
    net(X)
    net.wait()
    assert is_compiled(net)


def test_code_that_cannot_be_loaded(process, net):
    process.orders("garbage")
    compile_beside(net)
    assert len(net.failures) == 1 and torch.equal(net(X)[0], net.net(X))
    assert [group.failure.may_pass for group in net._groups] == [True], "a disk may be full, which PyTorch does not tell"


@pytest.fixture
def store(engine, process, tmp_path, monkeypatch):
    assert engine("background.thread").compiler.wait(120), "a job of a test before"
    code_store = engine("cache.code_store")
    store = code_store.CodeStore(tmp_path, 2**30, code_store.read_key(tmp_path))
    monkeypatch.setattr(code_store._Current, "store", store)
    return store


def restarted(engine, net=None):
    """The net as in a new process: what was compiled is in the store alone."""
    torch._dynamo.reset()
    engine("compile.registry")._groups.clear()
    engine("compile.registry")._recent.clear()
    return CompiledNet(engine, net or Net(block=Told), backend="inductor")


def test_kept_code_that_cannot_be_loaded_is_compiled_anew(engine, process, net, store, caplog):
    process.orders("garbage")
    compile_beside(net)
    kept = {name: store.get(name) for name in [*store.entries()]}  # a block of another test may be among them
    again = restarted(engine)
    again(X)
    assert [job.is_kept for group in again._groups for job in group.code.jobs] == [True]
    again.wait()
    assert is_compiled(again) and "cannot be loaded" in caplog.text
    assert sum(store.get(name) != content for name, content in kept.items()) == 1


@pytest.fixture
def load_ahead(engine, monkeypatch):
    module = engine("compile_process.load_ahead")
    monkeypatch.setattr(module, "_ready", {})
    return module


def test_kept_code_that_was_loaded_ahead_is_used_in_the_call_that_traces(engine, process, net, store, load_ahead):
    compile_beside(net)
    load_ahead.load_ahead(store, lambda: True)
    assert engine("background.thread").compiler.wait(60)
    again = restarted(engine)
    result, uncompiled = again(X)
    assert not uncompiled and torch.allclose(result, again.net(X), atol=1e-6)
    assert [group.stats.from_disk for group in again._groups] == [1]


@pytest.mark.parametrize("because", ["a prompt has come", "it is damaged", "it is of other versions", "it cannot be loaded"])
def test_code_that_was_not_loaded_ahead_is_loaded_while_the_call_goes_on(
    engine, process, net, store, load_ahead, because, monkeypatch, caplog
):
    compile_beside(net)
    if because == "it is damaged":
        for name in store.entries():
            store._file(name).write_bytes(b"garbage")
    elif because == "it is of other versions":
        monkeypatch.setattr(store, "is_current", lambda _name: False)
    with monkeypatch.context() as patch:
        if because == "it cannot be loaded":
            patch.setattr(load_ahead, "load", lambda _code: 1 / 0)
        load_ahead.load_ahead(store, lambda: because != "a prompt has come")
        assert engine("background.thread").compiler.wait(60) and not load_ahead._ready
    again = restarted(engine)
    assert again(X)[1]
    again.wait()
    assert is_compiled(again)


def test_what_comes_while_code_is_loaded_ahead_ends_that(engine, process, store, load_ahead):
    net, loaded = CompiledNet(engine, TwoKinds(), backend="inductor"), load_ahead._ready
    net.at_once(X)
    load_ahead.load_ahead(store, lambda: not loaded)
    assert engine("background.thread").compiler.wait(60) and len(loaded) == 1 < len(store.entries())


class Block(Told):
    def __init__(self):
        super().__init__()
        self.outer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(super().forward(x))


class Other(Block):
    def forward(self, x):
        return super().forward(x) + 1


class TwoKinds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)
        self.others = torch.nn.ModuleList(Other() for _ in range(3)).requires_grad_(False)

    def forward(self, x):
        for block in (*self.blocks, *self.others):
            x = block(x)
        return x


def test_what_people_set_for_all_of_pytorch_and_python_costs_no_code(process, net, monkeypatch, tmp_path):
    """Variables against stale caches; a `sitecustomize` that prints, as of tools that look on."""
    process.end()
    monkeypatch.setattr(process.client, "subprocess", subprocess)  # both are read when Python and PyTorch start
    for name in ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FREEZING"):
        monkeypatch.setenv(name, "1")
    for name in ("TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_FX_GRAPH_CACHE"):
        monkeypatch.setenv(name, "0")
    (tmp_path / "sitecustomize.py").write_text("print('hello from a site')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compile_beside(net)
    assert is_compiled(net) and why_inline(net) == [None]
    process.end()


def test_after_it_was_idle_another_one_is_started(process, net):
    process.orders("idle")
    compile_beside(net)
    assert is_compiled(net)
    first = process.now.pid
    wait_until(lambda: not is_alive(first), "it does not end")
    wait_until(lambda: process.now.pid is None, "the next prompt starts none while its model loads")
    compile_another(net)
    assert process.now.pid != first


def test_a_graph_that_comes_as_it_ends_by_idleness_is_given_to_another_one_of_its_kind(process, net, caplog, monkeypatch):
    process.orders("idle slowly")
    compile_beside(net)
    assert is_compiled(net)
    start, kinds = process.now._start, []
    monkeypatch.setattr(process.now, "_start", lambda measures: kinds.append(measures) or start(measures))
    process.begun()
    compile_another(net)
    assert kinds == [False] and "was lost" not in caplog.text


def test_a_process_that_has_ended_is_not_ended_again(process, monkeypatch):
    """Its PID may be that of another process by now."""
    process.now._ensure()
    ended = process.now._running.process
    ended.kill()
    ended.wait()
    killed = []
    monkeypatch.setattr(process.client.child, "kill_group", killed.append)
    running = process.now._ensure(measures=True).process
    assert killed == [] and running.pid != ended.pid
    monkeypatch.undo()
    process.end()


@pytest.mark.parametrize("what", ["code of the pack", "torch"])
def test_after_an_update_nothing_is_compiled_until_comfyui_is_started_anew(process, net, monkeypatch, what):
    """Not in the call either: there modules of the old version would import those of the new one."""
    process.end()
    monkeypatch.setattr(process.client, "versions", lambda now=process.client.versions: now() | {what: "2.0"})
    compile_beside(net)
    for _ in range(2):
        assert torch.equal(net(X)[0], net.net(X)) and why_inline(net) == [None]
        net.wait()
        (failure,) = net.failures
        assert f"updated while ComfyUI runs: {what} 2.0 to " in failure and "Start ComfyUI anew" in failure
        net.new_run()
    process.end()


def test_code_is_loaded_while_another_node_compiles_with_cuda_graphs(process, net):
    """Up to PyTorch 2.11 it sets that for all threads."""
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        compile_beside(net)
    assert is_compiled(net)


def test_pytorch_starts_no_processes_where_code_is_loaded(engine, process, net, monkeypatch):
    """On other threads it does, for those who compile there."""
    from torch._inductor import async_compile

    AsyncCompile = async_compile.AsyncCompile  # noqa: N806
    private, seen, before = engine("torch_compat.private"), [], vars(AsyncCompile)["use_process_pool"]
    load, asked = private.AOTCompiledArtifact.deserialize, threading.Event()
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 4)
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    monkeypatch.setattr(
        AsyncCompile, "process_pool", staticmethod(lambda: asked.set() or concurrent.futures.ThreadPoolExecutor(1))
    )

    def noting(content):
        seen.append((AsyncCompile().use_process_pool(), asked.is_set()))
        other = threading.Thread(target=AsyncCompile.use_process_pool)
        other.start()
        other.join()
        return load(content)

    monkeypatch.setattr(private.AOTCompiledArtifact, "deserialize", staticmethod(noting))
    compile_beside(net)
    assert is_compiled(net) and seen == [(False, False)] and asked.is_set()
    assert vars(AsyncCompile)["use_process_pool"] is before


def test_where_none_has_started_blocks_run_uncompiled_until_one_does(engine, process, net, caplog, monkeypatch):
    """The disk was full, or the system had no room for a process."""
    monkeypatch.setattr(engine("background.thread"), "RETRY_SECONDS", 0.05)
    process.refuse_to_start(monkeypatch)
    before = process.now.started
    first_call(net)
    wait_until(lambda: process.now._unstarted, "it was not tried")
    assert process.now.started == before + 2, "one, and another"
    for _call in range(3):
        result, uncompiled = net(X)
        assert uncompiled and torch.equal(result, net.net(X))
    assert net.is_being_compiled and not net.failures and process.now.started == before + 2, "no process more"
    monkeypatch.setattr(sys, "executable", PYTHON)
    process.now.refusal = None  # a minute later
    assert net.wait() == 1 and is_compiled(net) and why_inline(net) == [None]
    assert process.now.started == before + 3 and process.now._unstarted == 0
    assert "does not start: it ended with 7 (no room)" in caplog.text and caplog.text.count("blocks run uncompiled") == 1


def test_who_waits_for_code_of_a_process_that_does_not_start_has_it_in_the_next_run(process, net, monkeypatch):
    process.refuse_to_start(monkeypatch)
    assert torch.equal(net.at_once(X), net.net(X))
    (failure,) = net.failures
    assert "does not start" in failure
    monkeypatch.setattr(sys, "executable", PYTHON)
    net.new_run()
    net.at_once(X)
    assert is_compiled(net) and why_inline(net) == [None]


def test_where_none_starts_for_graph_after_graph_they_are_lowered_in_the_call(process, net, caplog, monkeypatch):
    monkeypatch.setattr(process.client, "UNSTARTED_GRAPHS", 1)
    process.refuse_to_start(monkeypatch)
    compile_beside(net)
    why = process.now.refusal.reason
    assert "ended with 7" in why and is_compiled(net) and why_inline(net) == [why]
    assert [r.levelno for r in caplog.records if "in the step that needs it" in r.getMessage()] == [logging.WARNING]
    monkeypatch.setattr(sys, "executable", PYTHON)
    process.now.refusal = dataclasses.replace(process.now.refusal, until=0.0)  # ten minutes later
    other = CompiledNet(net.engine, Net(block=Told, width=8), backend="inductor")
    torch._dynamo.reset()
    first_call(other)
    other.wait()
    process.now.check()
    assert is_compiled(other)


@pytest.mark.parametrize("executable", ["/opt/ComfyUI/ComfyUI.exe", "", None])
def test_without_a_python_graphs_are_lowered_in_the_call(process, net, caplog, monkeypatch, executable):
    process.end()
    monkeypatch.setattr(sys, "executable", executable)
    net(X)
    net.wait()
    assert is_compiled(net) and why_inline(net) == [process.now.refusal.reason]
    other = CompiledNet(net.engine, Net(block=Told, width=8), backend="inductor")
    assert not other(X)[1]
    assert caplog.text.count("in the step that needs it") == 1


def test_a_graph_that_only_its_call_can_lower_is_no_reason_for_others_of_the_block(process, net):
    process.orders("inline")
    compile_beside(net)
    assert is_compiled(net)
    (why,) = why_inline(net)
    assert "not here" in why
    other = X[0]
    assert net(other)[1], "it was lowered in the call"
    assert net.wait() and not net(other)[1] and is_compiled(net)


class TwoGraphs(Told):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x + 1)


def test_a_graph_that_only_its_call_can_lower_is_traced_alone(engine, process):
    net = CompiledNet(engine, Net(block=TwoGraphs), backend="inductor")
    process.orders("inline", "hold")
    first_call(net)
    process.begun()
    first_call(net)  # the first graph is lowered here; the process works on the second
    assert "not here" in why_inline(net)[0]
    process.tell("go_on")
    net.wait()
    assert is_compiled(net) and [group.code.version for group in net._groups] == [0], "code of the block was discarded"


def test_who_waits_has_the_code_of_a_graph_that_only_its_call_can_lower(process, net):
    process.orders("inline")
    assert torch.allclose(net.at_once(X), net.net(X), atol=1e-6) and "not here" in why_inline(net)[0]
    assert is_compiled(net)


def test_graphs_that_only_their_call_can_lower_are_asked_for_once(engine, process, monkeypatch):
    """Calls go on while the process thinks about each of them."""
    asked, calls, is_over = [], [], threading.Event()

    def refuse(request, block, patient):
        asked.append(request.key)
        wait_until(functools.partial(lambda end: len(calls) >= end or is_over.is_set(), len(calls) + 2), "no more calls")
        raise engine("compile_process.artefact").LowerInline("not here")

    monkeypatch.setitem(engine("compile.traced_graph").LOWERERS, "inductor", refuse)
    net = CompiledNet(engine, Net(block=TwoGraphs), backend="inductor")
    for _ in range(50):
        calls.append(1)
        if why_inline(net) != [None] and not net(X)[1]:
            break
        net(X)
        time.sleep(0.02)
    is_over.set()
    assert len(asked) == len(set(asked)) == 2 and is_compiled(net)


def test_an_executable_that_cannot_be_run_is_a_process_that_does_not_start(engine, process, monkeypatch):
    process.end()
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(process.client.NotStarted, match="no process can be started"):
        process.now.lower("")
    for _several_at_once in range(process.client.UNSTARTED_GRAPHS):
        with pytest.raises(engine("background.thread").Postponed, match="no process can be started"):
            process.now.lower("", patient=True)
    process.now.start()  # as when a prompt is queued
    process.now.check()


@pytest.mark.parametrize("where", ["there", "sdpa_backends", "pretty_print_target", "AOTCompiledArtifact"])
def test_without_a_private_name_that_the_process_needs_graphs_are_lowered_in_the_call(engine, process, net, monkeypatch, where):
    """As with a newer PyTorch, here or in the process; `canaries/renames.py` has the other names."""
    private = engine("torch_compat.private")
    if where == "there":
        process.end()
        process.tell("renamed")
    else:
        monkeypatch.setitem(private.NAMES, where, dataclasses.replace(private.NAMES[where], path="torch:_renamed"))
        monkeypatch.delitem(vars(private), where, raising=False)
    net(X)
    net.wait()
    assert is_compiled(net) and process.now.refusal is None
    (why,) = why_inline(net)
    assert "has no torch._renamed" in why
    if where == "there":
        process.end()


@pytest.mark.parametrize("works", [True, False])
def test_it_ends_with_its_parent(tmp_path, works):
    (tmp_path / "orders").write_text("hold" if works else "")
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "ORDERS": str(tmp_path)}
    script = [sys.executable, str(Path(__file__).with_name("parent_of_a_compile_process.py"))]
    parent = subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        file = tmp_path / "begun" if works else tmp_path / "orders"
        wait_until(lambda: file.exists() and not (tmp_path / "orders").read_text(), "it has not begun")
        all_of_them = descendants(pid)
        assert pid in all_of_them and is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not any(map(is_alive, all_of_them)), "it outlives its parent")
