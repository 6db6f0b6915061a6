"""Functions of Python modules that other nodes exchange, after code was made, for functions that read more of the options."""

import gc
import itertools
import sys
import types
import weakref

import pytest
import torch
from support import CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")

HOST = """
import sys

from torch import nn

elsewhere = sys.modules.get(__name__ + "_elsewhere")


def attention(x, transformer_options):
    return x.sin()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, transformer_options={}):
        return x + self.outer(attention(self.inner(x), transformer_options))


def stepped(x, transformer_options):
    return x * transformer_options["sigmas"]


def around(attention):
    def forward(x, transformer_options={}):
        return attention(x, transformer_options)

    return forward


class Layer(nn.Module):
    def forward(self, x, transformer_options={}):
        return x


class Nested(Block):
    def __init__(self, width):
        super().__init__(width)
        self.layer = Layer()

    def forward(self, x, transformer_options={}):
        return x + self.outer(self.layer(self.inner(x), transformer_options))


class Holding(Block):
    def __init__(self, width):
        super().__init__(width)
        self.attention, self.later = attention, None

    def helped(self, x, transformer_options):
        return x

    def forward(self, x, transformer_options={}):
        x = self.helped(x + self.outer(self.attention(self.inner(x), transformer_options)), transformer_options)
        return x if self.later is None else self.later(x, transformer_options)


class OfAModule(Block):
    def forward(self, x, transformer_options={}):
        return x + self.outer(elsewhere.attention(self.inner(x), transformer_options))
"""


numbers = itertools.count()


@pytest.fixture
def host(monkeypatch):
    """A module of the host's, with blocks that call its function `attention`, or that of the module `elsewhere`."""
    host = f"comfy.made_up_{next(numbers)}"  # Dynamo keeps modules by name
    for name in (f"{host}_elsewhere", host):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        exec(compile(HOST, "made_up.py", "exec"), vars(sys.modules[name]))  # noqa: S102
    return sys.modules[host]


def needs_the_step(x, transformer_options):
    return x * transformer_options["sigmas"]


def would_like_the_step(x, transformer_options):
    return x * transformer_options.get("sigmas", 0)


def scaled(factor):
    """A function that a node makes anew each time it runs."""
    return lambda x, transformer_options: x * (transformer_options["sigmas"] + factor)


class Object:
    def __call__(self, x, transformer_options):
        return x * transformer_options["sigmas"]


@pytest.fixture(params=[False, True], ids=["in the background", "at once"])
def check(engine, request):
    """A function: calls give what eager does, whatever the step; the number of graphs that there are then."""
    steps = {}

    def check(net):
        step, x = steps.setdefault(net, CompiledNet(engine, net)), torch.randn(2, 4, 8)
        for sigma in (2.0, 3.0):
            options = {"sigmas": torch.tensor([sigma]), "uuids": [sigma]}
            result = step.call(request.param, x, transformer_options=dict(options))
            assert torch.equal(result, net(x, transformer_options=options))
        assert not step.failures
        return step.graphs

    return check


@pytest.mark.parametrize("block", ["Block", "OfAModule"])
@pytest.mark.parametrize("attention", [needs_the_step, would_like_the_step, Object(), scaled(1.0)])
def test_a_function_is_exchanged_and_put_back(check, host, monkeypatch, block, attention):
    net = Net(getattr(host, block))
    assert check(net) == 1
    with monkeypatch.context() as patch:
        patch.setattr(host.elsewhere if block == "OfAModule" else host, "attention", attention)
        assert check(net) == 2
    assert check(net) == 2


def test_a_function_that_is_made_anew_is_no_other(check, host, monkeypatch):
    net, graphs = Net(host.Block), []
    for factor in (1.0, 1.0, 2.0, 1.0):
        monkeypatch.setattr(host, "attention", scaled(factor))
        graphs.append(check(net))
    assert graphs == [1, 1, 2, 2], "PyTorch guards its code and what that reads"


def test_what_this_pack_exchanges_for_a_while_is_no_other(check, engine, host):
    settings, net = engine("torch_settings"), Net(host.Block)
    scope = settings.SharedScope({"attention": settings.attribute(host, "attention")})
    assert check(net) == 1
    for _ in range(2):
        with scope.wrapping(attention=lambda hosts: lambda *args: hosts(*args)):
            assert check(net) == 2, "it gets no more options, as another pack's would: not one graph a step"
        assert check(net) == 2


def test_a_forward_that_closes_over_another_function(check, host):
    net = Net(host.Nested)
    assert check(net) == 1
    for count, attention in enumerate((host.attention, host.stepped), 2):
        for block in net.blocks:
            block.layer.forward = host.around(attention)
        assert check(net) == count


def test_a_forward_with_another_default_value(check, host):
    net, graphs = Net(host.Nested), []
    for factor in (1.0, 2.0, 1.0):
        for block in net.blocks:
            block.layer.forward = lambda x, transformer_options={}, by=factor: x * by
        graphs.append(check(net))
    assert graphs == [1, 2, 2], "PyTorch guards it (session.py, COMPILE_SWITCHES)"


@pytest.mark.parametrize("function", [needs_the_step, would_like_the_step, Object(), scaled(1.0)])
@pytest.mark.parametrize("name", ["attention", "helped", "later"])
def test_a_function_in_the_place_of_an_attribute_or_of_a_method(check, host, name, function):
    net = Net(host.Holding)
    before = [vars(block).get(name) for block in net.blocks]
    for _ in range(2):
        check(net)
        for block in net.blocks:
            setattr(block, name, function)
        assert check(net) == 2
        for block, value in zip(net.blocks, before, strict=True):
            if name == "helped":
                delattr(block, name)
            else:
                setattr(block, name, value)
    assert check(net) == 2


def test_a_function_that_no_code_calls_is_not_read(engine, host):
    """ComfyUI's trainer keeps the block's forward, then this pack's, in `org_forward`."""
    block, keys_read = host.Holding(8), engine("transformer_options.filter").keys_read
    block.org_forward = needs_the_step
    assert not keys_read(block)
    block.attention = needs_the_step
    assert "sigmas" in keys_read(block)


def test_exchanged_functions_are_freed(check, host, monkeypatch):
    net, attention = Net(host.Block), scaled(1.0)
    gone = weakref.ref(attention)
    with monkeypatch.context() as patch:
        patch.setattr(host, "attention", attention)
        check(net)
    del attention
    check(net)
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
