"""The thread that compiles waits while the host needs Python, save for a share of the time."""

import copy
import sys
import threading
import time
import traceback
import types

import pytest
import torch
from support import CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def gate(engine, monkeypatch):
    """The gate, of a host that executes a prompt, in Python all the time."""
    found = engine("background.gate").gate
    monkeypatch.setattr(found, "is_busy", lambda: True)
    monkeypatch.setattr(engine("background.gate"), "DUTY_CYCLE", 0.0)
    monkeypatch.setattr(found, "_credit", 0.0)
    found.close()
    yield found
    found.open()
    assert engine("background.thread").compiler.wait(60)
    found.close()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def asked(engine, gate):
    """asked(): a model for which code is wanted, in the background."""

    def ask():
        step = CompiledNet(engine, Net(), backend="aot_eager")
        step(torch.randn(2, 4, 8))
        return step

    return ask


def test_nothing_is_made_beside_a_busy_host_until_the_gate_opens(gate, asked):
    waited, step = gate.waited, asked()
    until(lambda: gate.waited > waited + 0.02)
    assert step.is_being_compiled and step(torch.randn(2, 4, 8))[1]
    gate.open()
    assert step.wait() == 1 and not step(torch.randn(2, 4, 8))[1]


def test_it_goes_on_when_the_host_is_idle(gate, asked, monkeypatch):
    waited, step = gate.waited, asked()
    until(lambda: gate.waited > waited)
    monkeypatch.setattr(gate, "is_busy", lambda: False)
    until(lambda: not step.is_being_compiled)
    assert not step(torch.randn(2, 4, 8))[1]


@pytest.mark.parametrize("seconds_held", [0, 60])
def test_a_job_waits_so_long_and_no_longer(engine, gate, asked, monkeypatch, seconds_held):
    monkeypatch.setattr(engine("background.gate"), "CEILING", 0.05)
    monkeypatch.setattr(gate, "jobs_past_ceiling", 0)
    gate.hold(seconds_held)
    step = asked()
    until(lambda: not step.is_being_compiled)
    assert gate.jobs_past_ceiling == 1 and not step(torch.randn(2, 4, 8))[1]


def test_who_waits_for_code_opens_it(asked):
    step = asked()
    step.at_once(torch.randn(2, 4, 8))
    assert step.graphs == 1


def wait_until_it_lowers():
    """Until the thread stands at the gate in the middle of lowering."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        thread = next((t for t in threading.enumerate() if t.name == "torch-compile-kit compile"), None)
        stack = traceback.extract_stack(sys._current_frames()[thread.ident]) if thread is not None else []
        names = [frame.name for frame in stack]
        if "lower" in names and names[-1] == "wait":
            return
        time.sleep(0.05)
    raise AssertionError("it does not lower")


def test_nobody_else_is_taken_to_compile(asked):
    """What asks whether it is being compiled (ComfyUI's streams and interrupts, other packs) is told of its own thread."""
    step = asked()
    wait_until_it_lowers()
    assert not torch.compiler.is_compiling()
    step.at_once(torch.randn(2, 4, 8))
    assert step.graphs == 1
    assert not torch.compiler.is_compiling()


def until_made(step, meanwhile):
    """Seconds until the thread has done its work, while this one does something over and over."""
    began = time.monotonic()
    while step.is_being_compiled:
        meanwhile()
        assert time.monotonic() < began + 100
    return time.monotonic() - began


def compute():
    """A while in Python."""
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        copy.deepcopy({"a": [1, "b", (2.0, None)], "c": {"d": {3}}})


def test_it_has_its_share_of_a_host_that_never_rests(engine, gate, asked, monkeypatch):
    monkeypatch.setattr(engine("background.gate"), "DUTY_CYCLE", 0.3)
    waited, step = gate.waited, asked()
    seconds = until_made(step, compute)
    assert not step(torch.randn(2, 4, 8))[1]
    assert 0 < gate.waited - waited < seconds


def test_a_call_that_waits_for_a_lock_of_the_workers_is_not_waited_for(gate, asked):
    """While it traces: neither would go on before the ceiling."""
    waited, step = gate.waited, asked()
    with gate.tracing():
        until(lambda: gate.waited > waited)
        assert step.is_being_compiled
        with gate.opened():
            until(lambda: not step.is_being_compiled)
    assert step.graphs == 1 and gate.jobs_past_ceiling == 0


class Local:
    """A local of the host's thread, which notes on which thread it was destroyed."""

    def __init__(self, threads):
        self.threads = threads

    def __del__(self):
        self.threads.append(threading.get_ident())


def test_no_local_of_the_hosts_thread_is_destroyed_on_the_worker(engine, monkeypatch):
    """A tensor of a CUDA graph capture ended ComfyUI's process there."""
    gate, destroyed, is_over = engine("background.gate").Gate(), [], threading.Event()
    gate.is_busy = lambda: True
    gate.close()
    gate.hold(60)

    def layer(depth):
        local = Local(destroyed)
        return layer(depth - 1) if depth else local is None

    def work():
        while not is_over.is_set():
            gate.wait()

    worker, interval = threading.Thread(target=work), sys.getswitchinterval()
    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _seconds: None)  # else the thread looks rarely
    monkeypatch.setattr(engine("background.gate"), "time", clock)
    sys.setswitchinterval(5e-5)
    try:
        worker.start()
        for _ in range(5000):
            layer(19)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        worker.join(60)
    assert set(destroyed) == {threading.get_ident()}


def test_time_between_two_jobs_is_not_held_against_it(engine, gate, monkeypatch):
    monkeypatch.setattr(engine("background.gate"), "DUTY_CYCLE", 0.15)
    monkeypatch.setattr(gate, "_asked", time.monotonic() - 3600)
    began, waited = time.monotonic(), gate.waited
    gate.wait()
    assert 0 < gate.waited - waited <= time.monotonic() - began < 60


def test_other_threads_import_as_ever_while_code_is_made(engine, gate):
    """A finder that came and went would have them miss modules: they go through `sys.meta_path` as it is changed."""
    finders, seen = list(sys.meta_path), []
    with engine("background.gate").waiting_at_gate():
        seen += sys.meta_path
    assert seen == finders == sys.meta_path


def test_nothing_of_it_stays(engine, gate):
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = list(sys.meta_path), FakeTensorMode.__torch_dispatch__, sys.getswitchinterval()
    gate.open()
    step = CompiledNet(engine, Net())
    step(torch.randn(2, 4, 8))
    assert step.wait() == 1
    assert (list(sys.meta_path), FakeTensorMode.__torch_dispatch__, sys.getswitchinterval()) == before
