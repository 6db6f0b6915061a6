"""A call that fails halfway, when a part of the block has run: what it has changed, where that is known and where not."""

import pytest
import torch
import torch._inductor.compile_fx
from support import Block, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.mark.parametrize("memory", [True, False], ids=["copies", "no memory for copies"])
def test_without_memory_for_copies_no_call_runs_again_on_what_it_has_changed(engine, monkeypatch, memory):
    compiled = []

    class InPlace(Block):
        """Changes its input."""

        def forward(self, x, transformer_options={}):  # noqa: B006
            x += self.inner(x)
            return x + self.outer(x)

    def compile_fx(graph, *_args, **_options):
        """Code that runs into a kernel which this machine does not have, when part of it has run."""
        compiled.append(graph)

        def code(*args):
            graph(*args)
            raise RuntimeError("no kernel for this")

        return code

    def no_memory(*_args, **_options):
        raise torch.OutOfMemoryError("no memory for copies")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    net, x = Net(InPlace, count=1), torch.randn(2, 4, 8)
    expected = net(x.clone())
    if not memory:
        monkeypatch.setattr(torch.Tensor, "clone", no_memory)
    with (
        engine("compile.session").watching,
        engine("compile.binding").Binding(net, engine("settings").CompileSettings()).bound(),
    ):
        if memory:
            assert torch.equal(net(x), expected)
        else:
            with pytest.raises(Exception, match="no kernel for this"):
                net(x)
    assert len(compiled) == 1
