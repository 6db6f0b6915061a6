"""The thread that compiles waits while the host needs Python, and is never kept for ever."""

import sys
import threading
import time
import traceback

import pytest
import torch
from support import Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def gate(engine, monkeypatch):
    """The gate, of a host that executes a prompt."""
    found = engine("background.gate").gate
    monkeypatch.setattr(found, "is_busy", lambda: True)
    found.close()
    yield found
    found.open()
    assert engine("background.thread").compiler.wait(60)
    found.close()


def ask(engine, net, x):
    settings = engine("settings").CompileSettings(backend="eager")
    call = engine("background.model_call").ModelCall(waits=False)
    with engine("compile.events").watching, engine("compile.binding").compiled_blocks(net, settings, call):
        net(x)
    return call


def graphs(engine, net):
    return sum(group.stats.graphs for group in engine("compile.registry").code_of(net).groups.values())


def test_nothing_is_made_beside_a_busy_host_until_the_gate_opens(engine, gate):
    net, x = Net(), torch.randn(2, 4, 8)
    ask(engine, net, x)
    time.sleep(0.5)
    assert graphs(engine, net) == 0 and engine("background.thread").compiler.busy
    gate.open()
    assert engine("background.thread").compiler.wait(60) and graphs(engine, net) == 1


def test_it_goes_on_when_the_host_is_idle(engine, gate, monkeypatch):
    net, x = Net(), torch.randn(2, 4, 8)
    ask(engine, net, x)
    time.sleep(0.2)
    monkeypatch.setattr(gate, "is_busy", lambda: False)
    deadline = time.monotonic() + 60
    while engine("background.thread").compiler.busy and time.monotonic() < deadline:
        time.sleep(0.05)
    assert graphs(engine, net) == 1


def test_who_waits_for_code_opens_it(engine, gate):
    net, x = Net(), torch.randn(2, 4, 8)
    ask(engine, net, x)
    settings = engine("settings").CompileSettings(backend="eager")
    with engine("compile.events").watching, engine("compile.binding").compiled_blocks(net, settings):
        net(x)
    assert graphs(engine, net) == 1


def wait_until_it_traces():
    """Until the thread stands at the gate in the middle of tracing."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        thread = next((t for t in threading.enumerate() if t.name == "torch-compile-kit compile"), None)
        stack = traceback.extract_stack(sys._current_frames()[thread.ident]) if thread is not None else []
        names = [frame.name for frame in stack]
        if "compile_inner" in names and names[-1] == "wait":
            return
        time.sleep(0.05)
    raise AssertionError("it does not trace")


def test_nobody_else_is_taken_to_compile(engine, gate):
    """What asks whether it is being compiled (ComfyUI's streams and interrupts, other packs) is told of its own thread."""
    net, x = Net(), torch.randn(2, 4, 8)
    ask(engine, net, x)
    wait_until_it_traces()
    assert not torch.compiler.is_compiling()
    settings = engine("settings").CompileSettings(backend="eager")
    with engine("compile.events").watching, engine("compile.binding").compiled_blocks(net, settings):
        net(x)
    assert graphs(engine, net) == 1
    assert not torch.compiler.is_compiling()


def test_it_is_not_kept_for_ever(engine, gate, monkeypatch):
    monkeypatch.setattr(engine("background.gate"), "PATIENCE", 0.2)
    net, x = Net(), torch.randn(2, 4, 8)
    ask(engine, net, x)
    deadline = time.monotonic() + 60
    while engine("background.thread").compiler.busy and time.monotonic() < deadline:
        time.sleep(0.05)
    assert graphs(engine, net) == 1


def test_nothing_of_it_stays(engine, gate):
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = list(sys.meta_path), FakeTensorMode.__torch_dispatch__, sys.getswitchinterval(), threading.active_count()
    gate.open()
    ask(engine, Net(), torch.randn(2, 4, 8))
    assert engine("background.thread").compiler.wait(60)
    time.sleep(0.2)
    assert (list(sys.meta_path), FakeTensorMode.__torch_dispatch__, sys.getswitchinterval()) == before[:3]
