"""Classes that are exchanged under a block, and methods that are replaced on them, after code was made and before."""

import contextlib
import copy
import functools
import gc
import types
import weakref

import pytest
import torch
from support import Block, CompiledNet, Net
from torch import nn

pytestmark = pytest.mark.usefixtures("inference_mode")


class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def shifted(self, x):
        return x + 1

    def forward(self, x):
        return self.layer(self.shifted(x))


class Outer(Block):
    def __init__(self, width=8):
        super().__init__(width)
        self.more = Inner(width)

    def scaled(self, x):
        return x * 1.5

    def forward(self, x):
        return self.scaled(super().forward(x) + self.more(x))


def made(factor, offset):
    """A layer of a class that is made for it, with numbers in the default values of its method."""

    class Made(nn.Module):
        def forward(self, x, factor=factor, *, offset=offset):
            return x * factor + offset

    return Made()


@pytest.fixture(params=[False, True], ids=["in the background", "at once"])
def check(engine, request):
    """A function: the code that is there after a call gives what eager does; the number of graphs."""
    steps = {}

    def check(net):
        step, x = steps.setdefault(net, CompiledNet(engine, net)), torch.randn(2, 4, 8)
        assert torch.equal(step.call(request.param, x), net(x)), "also while code is made"
        graphs = step.graphs
        result, eager = step(x)
        assert torch.equal(result, net(x)) and not eager and step.graphs == graphs and not step.failures
        return graphs

    return check


def times(factor):
    """The methods that are put in the place of others: for all factors the same code."""
    return lambda self, x: x * factor


METHODS = {
    "the block's forward": (Outer, "forward"),
    "the forward that it inherits": (Block, "forward"),
    "another method of the block": (Outer, "scaled"),
    "a layer's forward": (Inner, "forward"),
    "another method of a layer": (Inner, "shifted"),
    "the forward of PyTorch's layers": (nn.Linear, "forward"),
}


@pytest.mark.parametrize("cls, name", METHODS.values(), ids=METHODS)
def test_a_method_is_replaced_and_taken_back(check, monkeypatch, cls, name):
    net = Net(Outer)
    assert check(net) == 1
    with monkeypatch.context() as patch:
        for count, factor in enumerate((2.0, 3.0), 2):
            patch.setattr(cls, name, times(factor))
            assert check(net) == count
    assert check(net) == 3, "the first code serves again"


@pytest.mark.parametrize("cls, name", METHODS.values(), ids=METHODS)
def test_a_method_that_was_replaced_before_is_taken_back(check, monkeypatch, cls, name):
    net = Net(Outer)
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, times(2.0))
        check(net)
    check(net)


class Louder(Outer):
    """As RES4LYF's blocks: the same weights, another forward, and a number of its own."""

    place = 0

    def forward(self, x, mask=None):
        return super().forward(x) * (1 + self.place)


@pytest.mark.parametrize("numbered", [False, True])
def test_a_blocks_class_is_exchanged(check, numbered):
    net = Net(Outer)
    assert check(net) == 1
    for place, block in enumerate(net.blocks, 2):
        block.__class__ = Louder
        if numbered:
            block.place = place
    assert check(net) == 2, "one graph for all blocks, whatever their number"
    for block in net.blocks:
        block.__class__ = Outer
    assert check(net) == 2


def test_blocks_of_two_classes(check):
    net = Net(Outer)
    net.blocks[1].__class__ = Louder
    assert check(net) == 2
    net.blocks[1].__class__, net.blocks[2].__class__ = Outer, Louder
    assert check(net) == 2


class LouderInner(Inner):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_layers_class_is_exchanged(check):
    net = Net(Outer)
    check(net)
    net.blocks[1].more.__class__ = LouderInner
    assert check(net) == 2
    net.blocks[1].more.__class__ = Inner
    assert check(net) == 2


def with_twins(width=8):
    """A block with a layer whose class is made for it, as in Stable Cascade."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    block = Block(width)
    block.norm = Norm(width)
    return block


def test_a_class_that_each_block_has_of_its_own(check):
    net = Net(with_twins)
    assert check(net) == 1
    own = type(net.blocks[1].norm)
    net.blocks[1].norm.__class__ = nn.LayerNorm
    assert check(net) == 2
    net.blocks[1].norm.__class__ = own
    assert check(net) == 2
    own.forward = times(3.0)
    assert check(net) == 3


def knowing(block):
    class Knowing(Inner):
        def forward(self, x):
            return block.inner(x)

    return Knowing


def test_a_model_is_freed_whose_classes_know_it(engine):
    net = Net(Outer)
    step, x = CompiledNet(engine, net), torch.randn(2, 4, 8)
    step.at_once(x)
    net.blocks[0].more.__class__ = knowing(net.blocks[0])
    assert torch.equal(step.at_once(x), net(x))
    gone = weakref.ref(net)
    del net, step
    gc.collect()
    assert gone() is None


def test_classes_of_a_factory_whose_methods_have_other_default_values_stay_apart(check):
    net = Net(Outer)
    for block, numbers in zip(net.blocks, [(1.5, 0.0), (2.5, 0.0), (1.5, 1.0)], strict=True):
        block.more = made(*numbers)
    check(net)
    assert [block.more(torch.ones(())).item() for block in net.blocks] == [1.5, 2.5, 2.5]


def test_methods_that_a_node_replaces_again_and_again_leave_no_groups_behind(engine, monkeypatch):
    registry, net, seen = engine("compile.registry"), Net(count=3), []
    code, settings = registry.code_of(net), engine("settings").CompileSettings()
    for number in range(registry.MOST_LIKE + 4):
        monkeypatch.setattr(Block, "helper", lambda self, _number=number: self, raising=False)
        monkeypatch.setattr(Block, "forward", lambda self, x, _number=number: x + _number)
        code.new_run()
        seen.append({code.group_of(block, settings)[0] for block in net.blocks})
    assert all(len(groups) == 1 for groups in seen), "shared by the blocks"
    assert len(code.groups) <= registry.MOST_LIKE and seen[-1] <= set(code.groups.values())


class WrapsOnce(Net):
    """As another node's wrapper that gives blocks a forward in the first call that it sees, and leaves it there."""

    wraps = False

    def forward(self, x):
        for block in self.blocks:
            if self.wraps and not hasattr(block, "wrapped"):
                block.wrapped, own = True, block.forward
                block.forward = lambda x, own=own: own(x) * 1.5
        return super().forward(x)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_forward_that_is_set_during_a_call_stays_and_may_call_ours(engine, at_once):
    net, x = WrapsOnce(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    plain = net(x)
    other = copy.deepcopy(net)
    other.wraps = True
    expected = other(x)
    for wraps in (False, True, True):
        net.wraps = wraps
        assert torch.equal(step.call(at_once, x), expected if wraps else plain)
    assert torch.equal(net(x), expected), "also without this pack"
    for block in net.blocks:
        del block.forward
    assert torch.equal(step.at_once(x), plain) and not any("forward" in vars(block) for block in net.blocks)


def by_statement(kind):
    class Patched(kind):
        def forward(self, x):
            return super().forward(x) * 1.5

    return Patched


def by_type(kind):
    return type("Patched", (kind,), {"forward": lambda self, x: kind.forward(self, x) * 1.5})


@pytest.mark.parametrize("make", [by_statement, by_type])
def test_a_class_that_another_node_makes_for_each_prompt_is_that_nodes_and_compiled_once(check, make):
    net = Net(Outer)
    check(net)
    for _prompt in range(3):
        own = make(Inner)
        for block in net.blocks:
            block.more.__class__ = own
        assert check(net) == 2
        assert all(type(block.more) is own for block in net.blocks)
        for block in net.blocks:
            if isinstance(block.more, own):  # how the node tells what it has to take back
                block.more.__class__ = Inner
        del own
        gc.collect()
    assert check(net) == 2 and all(type(block.more) is Inner for block in net.blocks)


@pytest.mark.parametrize("make", [by_statement, by_type])
def test_blocks_of_a_class_that_each_has_of_its_own(check, make):
    net = Net(Outer)
    classes = [make(Outer) for _ in net.blocks]
    for block, cls in zip(net.blocks, classes, strict=True):
        block.__class__ = cls
    check(net)
    assert check(net) == 1 and [type(block) for block in net.blocks] == classes
    another = Net(Outer)  # of the same structure: it gets the code of the first
    for block in another.blocks:
        block.__class__ = make(Outer)
    check(another)


class Scaled:
    """An object in the place of a forward."""

    def __init__(self, layer, factor):
        self.layer, self.factor = layer, factor

    def __call__(self, x):
        return type(self.layer).forward(self.layer, x) * self.factor


OBJECTS = {"a partial": lambda layer, factor: functools.partial(Scaled.__call__, Scaled(layer, factor)), "an object": Scaled}


@pytest.mark.parametrize("kind", OBJECTS)
def test_layers_whose_forward_another_node_has_made_an_object_of_share_graphs(check, kind):
    """Another object for each layer, and for each prompt."""
    net, graphs = Net(), set()
    for prompt in range(3):
        for block in net.blocks:
            block.inner.forward = OBJECTS[kind](block.inner, 0.5 + prompt)
        graphs |= {check(net), check(net)}
    assert len(graphs) == 1
    assert not any(isinstance(block.inner.forward, types.MethodType) for block in net.blocks), "put back after each call"


class Once(Scaled):
    """An object that takes itself back in its first call."""

    def __call__(self, x):
        vars(self.layer).pop("forward", None)
        return super().__call__(x)


def test_an_object_that_takes_itself_back_is_gone(engine):
    net, x = Net(), torch.randn(2, 4, 8)
    plain, step = net(x), CompiledNet(engine, net)
    for block in net.blocks:
        block.inner.forward = Once(block.inner, 2.0)
    assert not torch.equal(step.at_once(x), plain)
    assert torch.equal(step.at_once(x), plain)


class Refusing(Scaled):
    def __call__(self, x):
        raise ZeroDivisionError("of another pack")


@pytest.mark.parametrize("on_failure", ["stop", "run uncompiled"])
def test_an_error_of_such_an_object_is_its_own(engine, on_failure):
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, on_failure=on_failure)
    net.blocks[0].inner.forward = Refusing(net.blocks[0].inner, 1.0)
    with pytest.raises(ZeroDivisionError, match="of another pack"):
        step.at_once(x)
    del net.blocks[0].inner.forward
    assert torch.equal(step.at_once(x), net(x)) and not step.failures


class Kind(type):
    """A metaclass, as an abstract class has one."""


class State(metaclass=Kind):
    """What another pack's node sets."""

    strength, mode, kinds = 1.0, "times", [2.0]


def host_function(x):
    return x


def of_another_pack(x):
    with contextlib.suppress(AttributeError):
        _ = State.missing
    return x * State.strength * State.kinds[0] if State.mode == "times" else x + type(State()).strength


class Calling(Block):
    def forward(self, x):
        return host_function(super().forward(x))


@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_function_reads_from_a_class_is_guarded(engine, monkeypatch, at_once):
    """A pack has replaced a function of the host's by one that reads what its node has set."""
    net, x = CompiledNet(engine, Net(Calling)), torch.randn(2, 4, 8)
    monkeypatch.setitem(globals(), "host_function", of_another_pack)
    for name, value in (("strength", 3.0), ("mode", "plus"), ("strength", 0.5), ("mode", "times"), ("kinds", [4.0])):
        for _ in range(2):
            assert torch.allclose(net.call(at_once, x), net.net(x), atol=1e-5)
        monkeypatch.setattr(State, name, value)
        for _ in range(2):
            assert torch.allclose(net.call(at_once, x), net.net(x), atol=1e-5), name
    assert net.graphs and not net.failures


def test_a_name_that_this_pytorch_lacks_is_not_set(engine, monkeypatch):
    """Nothing would remove it again."""
    private = engine("torch_compat.private")
    path = "torch._dynamo.variables.user_defined:UserDefinedClassVariable.of_another_version"
    monkeypatch.setitem(private.NAMES, "attribute_of_class", private.PrivateName(path, ""))
    read, write = private.switch("attribute_of_class")
    write(lambda: None)
    assert read() is None
