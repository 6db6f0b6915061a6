"""What CUDA graphs know of a model."""

import dataclasses
import gc
import weakref

import pytest
import torch
from support import Net
from torch import nn


def test_a_model_of_another_packs_class_is_freed(engine):
    """Such classes are looked at in each call, the network's own if it has no weights beside its layers."""
    graphs_of = engine("cuda_graphs.capture").graphs_of
    net = Net()
    graphs_of(net).drop_if_stale(net, torch.device("cpu"))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@dataclasses.dataclass
class Params:
    theta: float = 1.0
    names: tuple = ("a",)
    axes: list = dataclasses.field(default_factory=lambda: [1, 2])


class Holding(nn.Linear):
    """A layer of another pack, with weights, and what its node sets on it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.strength, self.mode, self.params, self._calls = 1.0, None, Params(), 0
        self.scales, self.unkeyable = {"a": 1.0}, [object()]


CHANGES = {
    "a number": lambda layer: setattr(layer, "strength", 0.2),
    "another type": lambda layer: setattr(layer, "strength", 1),
    "the sign of a zero": lambda layer: setattr(layer, "strength", -0.0),
    "nothing becomes a text": lambda layer: setattr(layer, "mode", "on"),
    "nothing becomes a tensor": lambda layer: setattr(layer, "mode", torch.zeros(1)),
    "a number of a dataclass": lambda layer: setattr(layer.params, "theta", 2.0),
    "a tuple of a dataclass": lambda layer: setattr(layer.params, "names", ("a", "b")),
    "a list of a dataclass, in place": lambda layer: layer.params.axes.append(3),
    "a dict, in place": lambda layer: layer.scales.update(a=2.0),
    "another attribute": lambda layer: setattr(layer, "added", True),
    "one less": lambda layer: delattr(layer, "mode"),
    "what PyTorch keeps": lambda layer: layer.train(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_graph_depends_on_plain_values_that_a_layer_holds(engine, change):
    net = Net().eval()
    net.entry = layer = Holding(8, 8).eval()
    state = engine("cuda_graphs.model_state").ModelState()
    state.look_at(net, torch.device("cpu"), None, lambda: None)
    if "zero" in next(name for name, value in CHANGES.items() if value is change):
        layer.strength = 0.0
    before, initial = state.held(), dict(vars(layer), params=Params(), scales={"a": 1.0})
    assert state.held() == before and hash(state.held()) == hash(before)
    layer._calls, layer.unkeyable = 1, [object()]
    assert state.held() == before, "what is private, or cannot be compared, does not count"
    change(layer)
    assert state.held() != before
    vars(layer).clear()
    vars(layer).update(initial)
    state.new_run()
    state.look_at(net, torch.device("cpu"), None, lambda: None)
    assert state.held() == before and hash(state.held()) == hash(before)


def test_values_that_are_set_anew_in_each_call_cost_no_new_key(engine):
    net = Net()
    net.entry = layer = Holding(8, 8)
    state = engine("cuda_graphs.model_state").ModelState()
    state.look_at(net, torch.device("cpu"), None, lambda: None)
    _, before = state.held()
    layer.strength, layer.params.theta = float("1"), float("1")
    assert state.held()[1] is before
