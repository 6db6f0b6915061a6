"""Two runs that wait for what the process does before its first compilation."""

import threading
import types

import pytest
import torch
from support import Block, CompiledNet, Net, compile_settings
from torch import nn


def test_a_run_that_need_not_wait_goes_on_while_another_still_waits(engine, monkeypatch):
    """Each run waits for the preparation by itself, and none behind another: it may hang."""
    startup, go_on, waits = engine("cache.startup"), threading.Event(), threading.Event()
    hanging = threading.Thread(target=go_on.wait, args=(120,), daemon=True)
    hanging.start()
    monkeypatch.setattr(startup, "_thread", hanging)
    polls, right = {"first": 0, "second": 0}, {}

    def run(name, width):
        def poll():
            polls[name] += 1
            if name == "first" and polls[name] == 3:  # before its first block, and twice while it waits
                waits.set()
            assert name == "first" or polls[name] < 50, "it waits behind the first"

        net, x = Net(width=width), torch.randn(2, 4, width)
        call = engine("background.model_call").ModelCall(poll=poll)
        settings = engine("settings").CompileSettings(backend="eager")
        with torch.inference_mode():
            expected = net(x)
            with engine("compile.session").watching, engine("compile.binding").Binding(net, settings, call).bound():
                right[name] = torch.equal(net(x), expected)

    first = threading.Thread(target=run, args=("first", 8))
    first.start()
    try:
        assert waits.wait(60)
        monkeypatch.setattr(startup, "_thread", None)  # for those who come from now on
        run("second", 16)
        assert right == {"second": True} and first.is_alive()
    finally:
        go_on.set()
        first.join(60)
    assert right["first"]


class _Other(Block):
    pass


class _TwoKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), _Other(), _Other()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_weights_are_dropped_before_the_worker_asks_for_room(engine):
    done = []
    weights = types.SimpleNamespace(of_block={}, drop=lambda: done.append("weights dropped"))
    call = engine("background.model_call").ModelCall(synchronous=False)
    call.when_over.append(lambda: done.append("job queued"))
    net = Net()
    with engine("compile.binding").Binding(net, compile_settings(engine), call, lambda _blocks: weights).bound():
        net(torch.zeros(2, 8))
    assert done == ["weights dropped", "job queued"]


def test_no_graph_is_lowered_while_the_call_may_trace_another(engine, monkeypatch):
    """Both are Python: on an H100's host a trace of 0.6 s took 3 s beside the worker."""
    compiler, seen = engine("background.thread").compiler, []
    monkeypatch.setattr(engine("compile.compiled_code"), "on_trace", [lambda: seen.append(compiler.busy)])
    net, x = _TwoKinds(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    with torch.inference_mode():
        assert compiler.wait(60) and torch.equal(step(x)[0], net(x))
        assert len(seen) >= 2 and not any(seen)
        step.wait()
        assert torch.equal(step(x)[0], net(x)) and not step.is_being_compiled and not step.failures


@pytest.mark.parametrize("hangs", [False, True])
def test_nothing_is_traced_while_the_process_prepares(engine, monkeypatch, hangs):
    """Unless that hangs; nor does the call wait for it."""
    startup, go_on = engine("cache.startup"), threading.Event()
    monkeypatch.setattr(startup, "_thread", None)
    monkeypatch.setattr(startup, "_begun", set())
    startup.prepare(lambda: go_on.wait(60))
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    with torch.inference_mode():
        if hangs:
            monkeypatch.setattr(startup, "LONGEST_WAIT", 0.0)
        assert torch.equal(step(x)[0], net(x)) and step.graphs == hangs
        go_on.set()
        startup.wait_until_prepared()
        step(x)
        step.wait()
        assert step.graphs == 1
