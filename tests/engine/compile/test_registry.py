"""What is kept of a model's compiled code, asked from other threads."""

import gc
import types
import weakref

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference_mode")


def test_the_page_may_ask_while_the_sampler_adds_groups(engine):
    code = engine("compile.registry").ModelCode()

    class Adding:
        """The sampler's thread has its turn in the middle of the question."""

        @property
        def patched(self):
            code._groups[("more", len(code._groups))] = types.SimpleNamespace(patched={})
            return {}

    code._groups = {("one", 0): Adding(), ("two", 0): Adding()}
    assert {("one", 0), ("two", 0)} <= set(code.groups)
    assert len(code._groups) == 4


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
