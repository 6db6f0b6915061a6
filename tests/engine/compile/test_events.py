"""Which of PyTorch's compilations are ours, by its own callbacks."""

import types

import pytest
import torch
from torch._dynamo import callback

# What PyTorch calls back for, and whether that is a compilation.
TRIGGERS = {"DYNAMO": True, "LAZY_BACKWARD": True, "TRITON_AUTOTUNING": False, "CUDAGRAPH_RECORDING": False}


@pytest.fixture
def events(engine):
    """The module, while it watches."""
    found = engine("compile.session")
    with found.watching:
        yield found


@pytest.fixture
def told(events):
    """What a call in progress on this thread has been told."""
    seen = []
    session = types.SimpleNamespace(block="Block", depth=0, start=lambda: seen.append("start"), end=lambda: seen.append("end"))
    events.monitor.calls.append(session)
    yield seen
    events.monitor.calls.remove(session)


@pytest.mark.parametrize(("trigger", "counted"), TRIGGERS.items())
def test_compiling_counts_and_measuring_kernels_and_recording_graphs_do_not(events, told, trigger, counted):
    before = events.monitor.compilations
    with callback.callback_handler.install_callbacks(callback.CallbackTrigger[trigger], "0/0"):
        assert told == ["start"] * counted
    assert told == ["start", "end"] * counted and events.monitor.compilations == before + counted


def test_the_triggers_are_those_of_this_pytorch():
    assert {trigger.name for trigger in callback.CallbackTrigger} == set(TRIGGERS)


def test_what_pytorch_compiles_in_a_call_of_ours_is_counted_once(events, told):
    before, compiled = events.monitor.compilations, torch.compile(lambda x: x + 1, backend="eager")
    for _ in range(2):
        compiled(torch.ones(2))
    assert told == ["start", "end"] and events.monitor.compilations == before + 1


def test_what_a_patch_compiles_for_itself_is_not_ours(events, told, engine):
    """It would be compiled with our settings: for sizes that vary where the pack wants one."""
    before, seen = events.monitor.compilations, []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: seen.append(inputs) or graph, dynamic=False)
    with engine("ownership").errors_marked():
        for size in (2, 3):
            compiled(torch.ones(size))
    assert told == [] and events.monitor.compilations == before
    assert [[value.shape for value in inputs] for inputs in seen] == [[(2,)], [(3,)]]
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert told == ["start", "end"], "after it they are ours again"


def test_compilations_of_others_are_not_ours(events):
    before, run = events.monitor.compilations, []
    torch.compile(lambda x: x + 1, backend=lambda graph, _inputs: run.append(graph) or graph)(torch.ones(2))
    assert run and events.monitor.compilations == before


def test_a_trace_whose_beginning_fails_is_not_as_long_as_the_machine_is_up(events, engine, monkeypatch):
    session_module = engine("compile.session")
    monkeypatch.setattr(session_module, "time", types.SimpleNamespace(perf_counter=lambda: 1e6))
    session = session_module.CompileSession("Block", lambda: 1 / 0, lambda _sources: {}, ((), {}), None)
    events.monitor.calls.append(session)
    try:
        with callback.callback_handler.install_callbacks(callback.CallbackTrigger.DYNAMO, "0/0"):
            pass
    finally:
        events.monitor.calls.remove(session)
    assert session.started and session.seconds == 0.0
