"""How long and how often blocks are traced in one call of a model, and in one run."""

import math

import pytest
import torch
from support import Block, CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


class Second(Block):
    pass


class Third(Block):
    pass


class Named(Block):
    """Another graph for each name, all of one group."""

    name = ""

    def forward(self, x):
        return super().forward(x) * len(self.name)


def of_three_kinds():
    net = Net(count=6)
    for block, kind in zip(net.blocks, (Block, Block, Second, Second, Third, Third), strict=True):
        block.__class__ = kind
    return net


def of_three_names():
    net = Net(Named)
    for block, name in zip(net.blocks, ("a", "bc", "def"), strict=True):
        block.name = name
    return net


@pytest.fixture
def bounds(engine, monkeypatch):
    """A function that sets after how many seconds of tracing no trace begins in a call, and in a run."""

    def set_bounds(call=math.inf, run=math.inf):
        monkeypatch.setattr(engine("compile.binding"), "CALL_SECONDS", call)
        monkeypatch.setattr(engine("compile.binding"), "RUN_SECONDS", run)

    return set_bounds


def put_off(engine, net):
    code = engine("compile.registry").code_of(net)
    return code.put_off, sum("Tracing blocks took too long" in line for line in code.eager_in_words())


@pytest.mark.parametrize("make", [of_three_kinds, of_three_names])
def test_what_a_call_has_no_time_to_trace_runs_uncompiled_and_is_traced_in_later_calls(engine, bounds, make):
    bounds(call=0.0)
    net, x = make(), torch.randn(2, 4, 8)
    expected, step = net(x), CompiledNet(engine, net)
    for graphs in (1, 2, 3):
        result, eager = step(x)
        assert torch.equal(result, expected) and step.wait() == graphs
        assert eager or graphs == 3, "the last graph of one group takes numbers that vary, and is lowered at once"
    assert put_off(engine, net) == (2, 1)
    result, eager = step(x)
    assert torch.equal(result, expected) and not eager and put_off(engine, net) == (2, 1)


@pytest.mark.parametrize("make", [of_three_kinds, of_three_names])
def test_a_run_too_has_its_time_after_which_code_that_is_there_is_used(engine, bounds, make):
    bounds(run=0.0)
    net, x = make(), torch.randn(2, 4, 8)
    expected, step = net(x), CompiledNet(engine, net)
    for graphs in (1, 2, 3):
        step.new_run()
        for _ in range(2):
            result, eager = step(x)
            assert torch.equal(result, expected) and step.wait() == graphs
            assert eager or graphs == 3
    assert put_off(engine, net) == (4, 1)
    other = torch.randn(3, 5, 8)
    result, eager = step(other)
    assert torch.equal(result, net(other)) and not eager, "also for sizes that this run has not seen"


def test_a_call_that_waits_has_all_the_time(engine, bounds):
    bounds(call=0.0, run=0.0)
    net, x = of_three_kinds(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    assert torch.equal(step.at_once(x), net(x)) and step.graphs == 3 and put_off(engine, net) == (0, 0)


@pytest.mark.parametrize("at_once", [False, True])
def test_code_that_is_replaced_in_each_step_is_given_up_for_the_run_and_tried_once_in_the_next(engine, monkeypatch, at_once):
    net, x, most = Net(), torch.randn(2, 4, 8), engine("compile.registry").MOST_NEW
    plain, own, step = net(x), Block.forward, CompiledNet(engine, net)
    traces = []
    monkeypatch.setattr(engine("compile.compiled_code"), "on_trace", [lambda: traces.append(step)])
    for expected in (most, 1, 1):
        step.new_run()
        traces.clear()
        for number in range(most + 4):
            monkeypatch.setattr(Block, "forward", lambda self, x, number=number: own(self, x * number))
            assert torch.equal(step.call(at_once, x), net(x))
        assert torch.equal(step.call(at_once, x), net(x)), "the code of the call before"
        assert len(traces) == expected and not engine("compile.registry").code_of(net).not_looked_at
        (failure,) = step.failures
        assert "replaced more than" in failure
    monkeypatch.setattr(Block, "forward", own)
    step.new_run()
    assert torch.equal(step.call(at_once, x), plain) and not step.failures
