"""Settings of PyTorch that other packs leave changed for the process: graphs, failures and results are as without."""

import pytest
import torch
from support import Block, CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")
# As nodes that compile leave them, and public scripts.
DYNAMO = {
    "error_on_recompile": True,
    "recompile_limit": 1,
    "accumulated_recompile_limit": 1,
    "inline_inbuilt_nn_modules": False,
    "install_free_tensors": True,
    "prepare_freezing": True,
    "allow_unspec_int_on_nn_module": True,
}
CHANGES = [*((torch._dynamo.config, name, value) for name, value in DYNAMO.items()), (torch._inductor.config, "freezing", True)]


class Scaled(Block):
    def __init__(self, width):
        super().__init__(width)
        self.scale, self.items = 2, [1]

    def forward(self, x):
        return super().forward(x) * self.scale + self.items[0]


@pytest.fixture(params=CHANGES, ids=lambda change: change[1])
def changed(request):
    config, name, value = request.param
    return config.patch({name: value})


@pytest.fixture
def no_code_of_others(engine, monkeypatch):
    registry = engine("compile.registry")
    for name in ("_groups", "_recent"):
        monkeypatch.setattr(registry, name, type(getattr(registry, name))())


def graphs_after_each_change(step):
    """How many graphs there are after other sizes, numbers and weights; each result is compared."""
    net, graphs = step.net, []

    def check(tokens=4):
        x = torch.randn(2, tokens, 8)
        assert torch.equal(step.at_once(x), net(x))
        graphs.append(step.graphs)

    for tokens in (4, 5, 7):
        check(tokens)
    for block in net.blocks:
        block.scale = 3
    check()
    for block in net.blocks:
        block.items = [5]
    check()
    for block in net.blocks:
        block.inner.weight.mul_(2)
        block.outer.weight = torch.nn.Parameter(block.outer.weight * 2, requires_grad=False)
    check()
    return graphs


def test_the_same_is_compiled(engine, changed, no_code_of_others):
    with changed:
        assert graphs_after_each_change(CompiledNet(engine, Net(Scaled))) == [1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("on_failure", ["stop", "run uncompiled"])
def test_a_block_that_cannot_be_traced_is_told(engine, monkeypatch, no_code_of_others, on_failure):
    step, x = CompiledNet(engine, Net(), on_failure=on_failure), torch.randn(2, 4, 8)
    monkeypatch.setattr(engine("compile.traced_graph"), "prepare", lambda *_: 1 / 0)
    with torch._dynamo.config.patch(suppress_errors=True):
        if on_failure == "stop":
            with pytest.raises(engine("errors").BlockCompileError):
                step.at_once(x)
        else:
            assert torch.equal(step.at_once(x), step.net(x))
    assert len(step.failures) == 1


def test_another_packs_code_is_called_under_its_own_settings(engine, no_code_of_others):
    """Its function that cannot be compiled runs uncompiled, as it has chosen; with a limit of its own."""
    net, x, seen = Net(), torch.randn(2, 4, 8), []

    def patch(y, _options):
        seen.append((torch._dynamo.config.suppress_errors, torch._dynamo.config.recompile_limit))
        return y * 2

    options = {"patches": {"attn1_output_patch": [patch]}}
    step = CompiledNet(engine, net)
    with torch._dynamo.config.patch(suppress_errors=True, recompile_limit=5):
        for _ in range(2):
            assert torch.equal(step.at_once(x, transformer_options=dict(options)), net(x, transformer_options=dict(options)))
    assert set(seen) == {(True, 5)} and not step.failures
