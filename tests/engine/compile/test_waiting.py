"""What a call and the worker leave each other to do first."""

import types

import torch
from support import Block, CompiledNet, Net, compile_settings
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
        assert torch.equal(step(x)[0], net(x))  # the first block, beside another one than the last, is traced as well
        step.wait()
        assert torch.equal(step(x)[0], net(x)) and not step.is_being_compiled and not step.failures
