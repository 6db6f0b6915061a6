"""A call that fails halfway, when a part of the block has run: what it has changed, where that is known and where not."""

import pytest
import torch
import torch._inductor.compile_fx
from support import Block, CompiledNet, Net, without_compile_process

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def lowered_in_the_call(engine, monkeypatch):
    without_compile_process(engine, monkeypatch)


@pytest.mark.usefixtures("lowered_in_the_call")
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


@pytest.mark.usefixtures("lowered_in_the_call")
@pytest.mark.parametrize("at_once", [False, True])
def test_an_import_of_pytorchs_that_fails_is_told_with_its_cure(engine, monkeypatch, tmp_path, at_once):
    (tmp_path / "inductor_that_misfits.py").write_text(
        "raise ImportError(\"cannot import name 'triton_key' from 'triton.compiler.compiler' (compiler.py)\")"
    )
    monkeypatch.syspath_prepend(tmp_path)
    private = engine("torch_compat.private")
    monkeypatch.setitem(private.NAMES, "compile_fx", private.PrivateName("inductor_that_misfits", "inductor is not used"))
    monkeypatch.setitem(vars(private), "compile_fx", None)
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend="inductor")
    result = step.at_once(x) if at_once else step(x)[0]
    step.wait()
    assert torch.allclose(result, net(x)) and torch.allclose(step(x)[0], net(x))
    (failure,) = step.failures
    assert "cannot import name 'triton_key'" in failure and "Triton" in failure.partition("triton_key")[2]


class Mute(RuntimeError):
    """Another pack's error, which fails to write itself."""

    def __str__(self):
        raise ValueError("no text")


def _left_over_by_an_uninstallation(engine, monkeypatch, tmp_path):
    (tmp_path / "triton-3.6.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)


def _unreadable_machine(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(engine("failures.machine").Machine, "this", lambda: 1 / 0)


def _failing_layers(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(engine("compile.compiled_code"), "on_compile_failure", [lambda _block: 1 / 0])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'"), Mute()], ids=["triton", "mute"])
@pytest.mark.parametrize("breaks", [_left_over_by_an_uninstallation, _unreadable_machine, _failing_layers])
def test_an_error_while_an_error_is_described_costs_no_image_and_is_not_tried_again(
    engine, monkeypatch, tmp_path, at_once, error, breaks
):
    tries = []

    def backend(graph, _inputs):
        tries.append(graph)
        raise error

    breaks(engine, monkeypatch, tmp_path)
    net, x = Net(), torch.randn(2, 4, 8)
    expected, step = net(x), CompiledNet(engine, net, backend=backend)
    for _ in range(3):
        assert torch.equal(step.at_once(x) if at_once else step(x)[0], expected)
        step.wait()
    (failure,) = step.failures
    assert type(error).__name__ in failure and len(tries) == 1
    if breaks is not _unreadable_machine:
        assert engine("failures.machine").preflight_here(False)[0], "the page asks for it"
