"""The line on a node: only what really ran is told."""

import types

import pytest
import torch

SHAPE = (1, 4, 8, 8)


@pytest.fixture
def clock(engine, monkeypatch):
    """clock(seconds): so much time passes, for the line."""
    now = [100.0]
    passes = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(engine("notices.status"), "time", passes)
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.fixture
def node(engine, clock, monkeypatch):
    """The line of a node whose model has one group of blocks, and what the page was told."""
    found = engine("notices.status").Status("7")
    found.group = types.SimpleNamespace(
        class_name="Block",
        is_being_compiled=False,
        failure=None,
        stats=types.SimpleNamespace(graphs=0),
        code=types.SimpleNamespace(is_tracing=False),
    )
    code = types.SimpleNamespace(groups={"key": found.group})
    monkeypatch.setattr(engine("notices.status"), "code_of", lambda network: code)
    found.told = []
    monkeypatch.setattr(engine("notices.status"), "listeners", [lambda *news: found.told.append(news)])
    found.network = torch.nn.Identity()
    return found


def run(node, clock, seconds, eager=False, other=False, calls=1):
    """A sampling run with steps of so many seconds; the first loads the weights."""
    node.new_run()
    for taken in (5.0, *seconds):
        step = object()
        for _ in range(calls):
            node.begins(node.network, step, SHAPE)
            clock(taken / calls)
            node.ends(eager, other)


def test_while_a_call_traces_it_is_prepared(node):
    node.group.code.is_tracing = node.group.is_being_compiled = True
    node.begins(node.network, object(), SHAPE)
    node.tell()
    assert node.told[-1] == ("7", "compiling", "preparing Block")
    node.group.code.is_tracing = False
    node.tell()
    assert node.told[-1] == ("7", "compiling", "compiling Block, 0 s; images go on")


def test_from_compiling_to_ready(node, clock):
    node.group.is_being_compiled = True
    run(node, clock, [0.2] * 6, eager=True)
    assert node.told[0] == ("7", "compiling", "compiling Block, 0 s; images go on")
    assert node.told[-1] == ("7", "compiling", "compiling Block, 1 s; images go on")
    node.group.is_being_compiled, node.group.stats.graphs = False, 1
    node.tell()
    assert node.told[-1] == ("7", "ready", "ready")
    run(node, clock, [0.15] * 6)
    assert node.told[-1] == ("7", "ready", "ready: steps 25% faster (0.200 -> 0.150 s)")
    node.group.stats.graphs = 2
    run(node, clock, [0.15] * 2)
    assert node.told[-1] == ("7", "ready", "ready: steps 25% faster (0.200 -> 0.150 s); 1 compiled since")


def test_what_was_gained_is_counted_from_steps_that_ran_both_ways(node, clock, engine):
    use = engine("notices.status").use_of(node.network)
    run(node, clock, [0.2] * 2, eager=True)
    run(node, clock, [0.1] * 5)
    assert use.gained is None, "two steps say nothing"
    run(node, clock, [0.2] * 3, eager=True)
    run(node, clock, [0.1] * 6)
    run(node, clock, [0.3] * 2)
    assert use.gained == pytest.approx(5 * 0.1 - 0.1)


def test_nothing_is_claimed_that_has_not_run(node, clock):
    node.group.stats.graphs = 1
    run(node, clock, [0.15] * 2)
    assert node.now() == ("ready", "ready")
    run(node, clock, [0.15] * 6)
    assert node.now() == ("ready", "ready: 0.150 s a step")


@pytest.mark.parametrize(
    "now, words", [(0.25, "steps 25% slower (0.200 -> 0.250 s)"), (0.201, "steps as fast as before, 0.201 s")]
)
def test_what_is_no_gain_is_said(node, clock, now, words):
    run(node, clock, [0.2] * 6, eager=True)
    node.group.stats.graphs = 1
    run(node, clock, [now] * 6)
    assert node.now() == ("ready", f"ready: {words}")


def test_steps_that_did_something_else_do_not_count(node, clock):
    node.group.stats.graphs = 1
    run(node, clock, [9.0] * 6, other=True)
    run(node, clock, [0.1] * 6, calls=2)
    assert node.now() == ("ready", "ready: 0.100 s a step"), "two calls of the model make a step"


def test_a_block_that_cannot_be_compiled(node, clock):
    node.group.failure, node.group.stats.graphs = "why", 1
    run(node, clock, [0.2] * 4)
    assert node.now() == ("failed", "Block runs uncompiled; the log says why")
