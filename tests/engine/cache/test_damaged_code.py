"""Compiled code on disk that cannot be loaded: the block is compiled once more and runs compiled."""

import pytest
import torch
import torch._inductor.compile_fx
from support import Block, CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_block_whose_code_on_disk_cannot_be_loaded_is_compiled_once_more(engine, monkeypatch, tmp_path, caplog, damaged):
    calls = []

    class Damaged(Block):
        def forward(self, x, transformer_options={}):  # noqa: B006
            return super().forward(x, transformer_options=transformer_options)

    def compile_fx(graph, *_args, **_options):
        calls.append(graph)
        if len(calls) <= damaged:
            raise EOFError("Ran out of input")  # pickle's, of a file that is cut off
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    Damaged.__name__ = f"Damaged{damaged}"  # a folder of its own: what was emptied once in a process is not emptied again
    net, x = Net(Damaged), torch.randn(2, 4, 8)
    expected = net(x)
    assert engine("cache.disk").open_cache(tmp_path) is not None
    with (
        engine("compile.session").watching,
        engine("compile.binding").Binding(net, engine("settings").CompileSettings()).bound(),
    ):
        assert torch.equal(net(x), expected)
    (group,) = engine("compile.registry").code_of(net).groups.values()
    assert len(calls) == 2 and "is emptied, and compiled anew" in caplog.text
    assert (group.failure is None) == (damaged == 1), "what fails again has another cause: the block runs eager"


def test_so_is_a_graph_with_numbers_that_vary(engine, monkeypatch, tmp_path, caplog):
    """It is lowered in the call that traces it."""
    calls = []

    class DamagedWithNumbers(Block):
        """A folder of its own, see above."""

    def compile_fx(graph, *_args, **_options):
        calls.append(graph)
        if len(calls) == 2:
            raise EOFError("Ran out of input")
        return graph.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    net, x = Net(DamagedWithNumbers), torch.randn(2, 4, 8)
    assert engine("cache.disk").open_cache(tmp_path) is not None
    step = CompiledNet(engine, net, backend="inductor")
    for scale in (2.0, 3.0, 4.0):
        assert torch.equal(step.at_once(x, scale=scale), net(x, scale=scale))
    assert len(calls) == 3 and "is emptied, and compiled anew" in caplog.text and not step.failures
