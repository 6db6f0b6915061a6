"""Which of PyTorch's callbacks are compilations of ours."""

import types

import pytest


@pytest.fixture
def told(engine):
    """What a call in progress on this thread has been told."""
    events, seen = engine("compile.events"), []
    session = types.SimpleNamespace(block="Block", start=lambda: seen.append("start"), end=lambda: seen.append("end"))
    events.monitor.calls.append(session)
    yield seen
    events.monitor.calls.remove(session)


def args(trigger):
    return types.SimpleNamespace(callback_trigger=types.SimpleNamespace(name=trigger))


@pytest.mark.parametrize("given", [None, args("DYNAMO"), args("LAZY_BACKWARD"), types.SimpleNamespace()])
def test_a_compilation_is_counted(engine, told, given):
    events = engine("compile.events")
    before = events.monitor.compilations
    events._on_compile_start(given)
    events._on_compile_end(given)
    assert told == ["start", "end"] and events.monitor.compilations == before + 1


@pytest.mark.parametrize("trigger", ["TRITON_AUTOTUNING", "CUDAGRAPH_RECORDING"])
def test_measuring_kernels_and_recording_graphs_are_none(engine, told, trigger):
    events = engine("compile.events")
    before = events.monitor.compilations
    events._on_compile_start(args(trigger))
    events._on_compile_end(args(trigger))
    assert told == [] and events.monitor.compilations == before


def test_the_triggers_are_those_of_this_pytorch():
    from torch._dynamo.callback import CallbackTrigger

    assert {"DYNAMO", "LAZY_BACKWARD", "TRITON_AUTOTUNING", "CUDAGRAPH_RECORDING"} <= {
        trigger.name for trigger in CallbackTrigger
    }


def test_compilations_of_others_are_not_ours(engine):
    events = engine("compile.events")
    before = events.monitor.compilations
    events._on_compile_start(args("DYNAMO"))
    events._on_compile_end(args("DYNAMO"))
    assert events.monitor.compilations == before
