"""Modules that cannot be looked at: what they concern runs uncompiled, and it is said once."""

import pytest
import torch
from capturing import trust
from support import Block, CompiledNet, Net
from torch import nn

pytestmark = pytest.mark.usefixtures("inference_mode")


class OddBlock(Block):
    error = RuntimeError("not like this")

    def named_buffers(self, *_args, **_kwargs):
        raise self.error


class Odd(Net):
    def named_children(self):
        raise AttributeError("no children")


@pytest.fixture(params=[False, True], ids=["in the background", "at once"])
def check(engine, request):
    """A function: three calls give what eager does; what was compiled of it."""

    def check(net):
        step = CompiledNet(engine, net)
        for size in (2, 3, 2):
            x = torch.randn(size, 4, 8)
            assert torch.equal(step.call(request.param, x), net(x))
        assert not step.failures
        return step.graphs

    return check


def test_a_block_that_cannot_be_looked_at(check, engine, caplog):
    net = Net()
    net.blocks[1] = OddBlock()
    assert check(net) == 1, "the others are compiled"
    assert caplog.text.count("OddBlock runs uncompiled: this pack could not look at it (RuntimeError: not like this).") == 1
    assert engine("compile.registry").code_of(net).not_looked_at == {"OddBlock": "RuntimeError: not like this"}


def test_a_model_that_cannot_be_looked_at(check, caplog):
    assert check(Odd()) == 0
    assert caplog.text.count("Odd runs uncompiled") == 1


def test_a_model_that_can_be_looked_at_again(check, engine, monkeypatch):
    """Another node's patch was in the way, for a prompt."""
    net = Odd()
    assert check(net) == 0
    monkeypatch.delattr(Odd, "named_children")
    assert check(net) == 1
    assert not engine("compile.registry").code_of(net).not_looked_at, "the report's line is gone"


def test_out_of_memory_is_the_hosts_to_handle(engine, monkeypatch):
    net = Net(OddBlock)
    monkeypatch.setattr(OddBlock, "error", torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        CompiledNet(engine, net).at_once(torch.randn(2, 4, 8))


def scripted(module):
    with torch.inference_mode(False):
        return torch.jit.script(module)


def with_a_script_inside(width=8):
    block = Block(width)
    block.norm = scripted(nn.LayerNorm(width))
    return block


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["beside the blocks", "in each block", "in one block", "a block"])
def test_modules_of_torch_jit(check, caplog, where):
    net = Net(with_a_script_inside if where == "in each block" else Block)
    if where == "beside the blocks":
        net.entry = nn.Sequential(net.entry, scripted(nn.GELU()))
    elif where == "in one block":
        net.blocks[1] = with_a_script_inside()
    elif where == "a block":
        net.blocks[1] = scripted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert check(net) > 0 or where == "in each block", "PyTorch may leave a call alone that begins with one"
    assert "uncompiled" not in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cuda_graph_of_a_model_with_a_module_of_torch_jit(engine, monkeypatch):
    net, dropped = Net(with_a_script_inside), []
    trust(engine, monkeypatch, "support.py", "test_odd_modules.py")
    state = engine("cuda_graphs.model_state").ModelState()
    for _ in range(2):
        state.check_unchanged(net, torch.device("cpu"), None, lambda: dropped.append(1))
    assert state.obstacle is state.foreign is None and len(dropped) == 1


class AllInOne(nn.Module):
    """As a cache of steps over the blocks: one module, in the place of their list, that calls them."""

    def __init__(self, blocks):
        super().__init__()
        self.hidden = blocks

    def forward(self, x):
        for block in self.hidden:
            x = block(x)
        return x


@pytest.mark.parametrize("hidden", [nn.ModuleList, list], ids=["modules", "unseen"])
@pytest.mark.parametrize("runs", [(True, False), (False, True, False)], ids=["at first", "later"])
def test_blocks_that_another_nodes_module_hid_for_a_run(check, engine, hidden, runs):
    net, code = Net(), engine("compile.registry").code_of
    blocks = net.blocks
    for hides in runs:
        code(net).new_run()
        net.blocks = nn.ModuleList([AllInOne(hidden(blocks))]) if hides else blocks
        graphs = check(net)
    assert graphs == (1 if hidden is nn.ModuleList else 2)
    plan = engine("compile.binding").plan_for(net)
    assert plan.summary() == "blocks.* (3 Block)"
