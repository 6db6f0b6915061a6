"""What layers hold beside weights, as a key."""

import types

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
