"""What layers hold beside weights, as a key."""

import types

import pytest
import torch
from torch import nn


def test_lora_that_the_host_adds_on_the_way_into_pages_is_no_part_of_it(engine):
    """The pages keep their place, whatever is in them (comfy/model_patcher.py, `ModelPatcherDynamic.load`)."""
    layer = nn.Linear(2, 2)
    layer.weight_lowvram_function = None
    values = engine("cuda_graphs.keys").HeldValues([layer])
    before = values.key()
    layer.weight_lowvram_function = lambda weight: weight
    assert values.key() == before
    layer.strength = 0.5
    assert values.key() != before


def test_it_is_listed_once_for_the_same_modules(engine):
    state, net = engine("cuda_graphs.model_state").ModelState(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def look():
        state.new_run()
        state.look_at(net, torch.device("cpu"), None, lambda: None)
        return state.held()[1]

    first = look()
    assert look() is first
    net.append(nn.Linear(2, 2))
    assert look() is not first
    net[0].strength = 0.5
    assert look() != first


class Params:
    def __init__(self, theta):
        self.theta = theta


def test_an_object_that_is_exchanged_for_another_is_seen(engine):
    """By an object patch, which keeps the one before."""
    net, other = nn.Linear(2, 2), Params(2)
    net.params = before = Params(1)
    values = engine("cuda_graphs.keys").HeldValues([net])
    first = values.key()
    net.params = other
    second = values.key()
    assert first != second
    net.params = before
    assert values.key() == first
    net.params = types.SimpleNamespace(theta=2)
    assert values.key() != first


@pytest.mark.parametrize(
    "put", [lambda t: t, lambda t: [t], lambda t: (1, t), lambda t: {"down": (t, 0.5)}], ids=["plain", "list", "tuple", "dict"]
)
@pytest.mark.parametrize("name", ["mask", "_mask"])
def test_another_tensor_is_seen(engine, put, name):
    """A replay would read the one before, or memory that was freed."""
    layer = nn.Linear(2, 2)
    tensors = torch.zeros(3), torch.ones(3)
    setattr(layer, name, put(tensors[0]))
    values = engine("cuda_graphs.keys").HeldValues([layer])
    first = values.key()
    assert values.key() is first
    setattr(layer, name, put(tensors[1]))
    second = values.key()
    assert second != first
    setattr(layer, name, put(tensors[0]))
    assert values.key() == first
    tensors[0].fill_(2)  # a replay reads that
    assert values.key() == first
    setattr(layer, name, put(tensors[0][:2]))
    assert values.key() not in (first, second)


def test_a_number_on_the_cpu_is_seen_by_value(engine):
    layer = nn.Linear(2, 2)
    layer.scale = torch.tensor(1.0)
    values = engine("cuda_graphs.keys").HeldValues([layer])
    first = values.key()
    layer.scale.fill_(2.0)
    assert values.key() != first


def test_a_tensor_that_is_put_into_a_cache_is_seen(engine):
    layer = nn.Linear(2, 2)
    layer.cache = {}
    values = engine("cuda_graphs.keys").HeldValues([layer])
    first = values.key()
    layer.cache["k"] = torch.zeros(3)
    assert values.key() != first


def test_more_tensors_than_are_looked_at_have_no_key(engine):
    layer, keys = nn.Linear(2, 2), engine("cuda_graphs.keys")
    layer.cache = [torch.zeros(1)] * 100
    with pytest.raises(keys.NoKey):
        keys.HeldValues([layer]).key()
