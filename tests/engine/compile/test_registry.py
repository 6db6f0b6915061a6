"""What is kept of a model's compiled code, asked from other threads."""

import gc
import weakref

import pytest
import torch
from support import CompiledNet, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


def test_models_may_come_and_go_while_they_are_counted(engine):
    per_model = engine("per_model").PerModel(lambda model: object())
    models = [torch.nn.Identity() for _ in range(3)]
    for model in models:
        per_model(model)
    late = torch.nn.Identity()

    class Adding(dict):
        """Another thread has its turn while the models are gone through."""

        def items(self):
            for item in super().items():
                self[weakref.ref(late)] = object()
                yield item

    per_model._values.data = Adding(per_model._values.data)
    assert {model for model, _value in per_model.items()} == set(models)
    del models[:2], model
    gc.collect()
    assert len(per_model.items()) == 1


def test_the_next_model_of_a_structure_uses_the_code_of_one_that_was_freed(engine):
    """As under --cache-none, where each prompt loads the model anew."""
    x, alive = torch.randn(2, 4, 8), []
    for number in range(3):
        net = CompiledNet(engine, Net())
        result = net.at_once(x)
        assert torch.equal(result, net.net(x)) and net.graphs == 1
        assert number == 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        alive.append(weakref.ref(net.net))
        del net, result
        gc.collect()
    assert [model() for model in alive] == [None] * 3, "no weight is in the code"


def test_code_of_models_that_are_gone_is_freed_when_others_were_used(engine, monkeypatch):
    registry = engine("compile.registry")
    monkeypatch.setattr(registry, "MOST_RECENT", 2)
    groups = []
    for width in (8, 16, 24, 32):
        net = CompiledNet(engine, Net(width=width))
        net.at_once(torch.randn(2, 4, width))
        groups += map(weakref.ref, net._groups)
        del net
    gc.collect()
    assert [group() is not None for group in groups] == [False, False, True, True]
