"""What a call and the worker leave each other to do first."""

import types

import torch
from support import Block, CompiledNet, Held, Net, compile_settings
from torch import nn


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


def test_blocks_run_as_without_the_pack_while_their_code_is_made(engine, monkeypatch):
    """Guards and operators one by one take longer. Shapes that have code run compiled meanwhile."""
    looked, code = [], engine("compile.compiled_code").BlockCode
    call = code.call
    monkeypatch.setattr(code, "call", lambda self, *args: looked.append(self.name) or call(self, *args))
    net, several, one = Net(), torch.randn(2, 4, 8), torch.randn(1, 4, 8)
    backend = Held()
    step = CompiledNet(engine, net, backend=backend)

    def run(x):
        """How many blocks looked for code, and whether one ran without."""
        looked.clear()
        result, eager = step(x)
        assert torch.equal(result, net(x))
        return len(looked), eager

    with torch.inference_mode():
        assert run(several) == (3, True)  # the first block is traced, the others look for code and find none,
        assert run(several) == run(several) == (1, True)  # so from then on one block looks for all
        backend.go_on.set()
        step.wait()
        assert run(several) == (3, False)
        backend.go_on.clear()
        assert run(one) == (3, True)  # the first block is traced, the others find no code
        assert run(one) == (1, True)
        assert run(several) == (3, False)
        backend.go_on.set()
        step.wait()
        assert run(one) == (3, False)
        assert not step.failures and step.graphs == 2


def test_another_variant_is_traced_while_the_first_is_lowered(engine):
    """Code that was traced for one input may not fit that of a later call."""
    net, x, backend = _TwoKinds(), torch.randn(2, 4, 8), Held()
    step = CompiledNet(engine, net, backend=backend)
    with torch.inference_mode():
        assert torch.equal(step(x.clone())[0], net(x)) and step.graphs == 2
        for _ in range(4):
            assert torch.equal(step(x)[0], net(x))
        assert step.graphs == 3, "one for the first block, whose input was made outside of inference mode"
        backend.go_on.set()
        step.wait()
        assert torch.equal(step(x)[0], net(x)) and step(x)[1] is False


class _Scaled(Block):
    """Blocks that differ in a number, for each of which there is a graph."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def test_a_block_runs_its_code_though_others_of_its_group_have_none_yet(engine, monkeypatch):
    looked, code = [], engine("compile.compiled_code").BlockCode
    call = code.call
    monkeypatch.setattr(code, "call", lambda self, *args: looked.append(self.name) or call(self, *args))
    monkeypatch.setattr(engine("compile.binding"), "CALL_SECONDS", 0.0)  # a call traces one block
    net, x, backend = Net(_Scaled), torch.randn(2, 4, 8), Held()
    net.blocks[2].factor = 2.0
    step = CompiledNet(engine, net, backend=backend)
    backend.go_on.set()
    with torch.inference_mode():
        step(x)  # the first block is traced
        step.wait()
        backend.go_on.clear()
        step(x)  # and the last
        for _ in range(2):
            looked.clear()
            assert torch.equal(step(x)[0], net(x)) and len(looked) == 3
        backend.go_on.set()
        step.wait()
        assert step.graphs == 2 and not step(x)[1]
