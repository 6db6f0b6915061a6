"""comfy-kitchen's products while a graph is made: operators, and afterwards what they were."""

import pytest
import torch

pytestmark = pytest.mark.host


@pytest.fixture
def kitchen(tiny):
    import comfy_kitchen

    return comfy_kitchen


@pytest.fixture
def calls(kitchen, engine, monkeypatch):
    """How often the product ran; nobody can trace it, like a kernel."""
    from comfy_kitchen.backends import eager

    with engine("inductor.kitchen").products_as_operators():  # reads what arguments the product has
        calls, plain = [], eager.int8_linear

    @torch._dynamo.disable
    def product(**kwargs):
        calls.append(kwargs["x"].shape)
        assert not torch._guards.detect_fake_mode(list(kwargs.values()))
        return plain(**kwargs)

    monkeypatch.setattr(eager, "int8_linear", product)
    return calls


def test_a_product_that_cannot_be_traced_is_an_operator_of_the_graph(kitchen, engine, calls):
    products_as_operators = engine("inductor.kitchen").products_as_operators
    x, weight = torch.randn(2, 8, 256), kitchen.quantize_int8_rowwise(torch.randn(64, 256))

    def linear(x):
        return kitchen.int8_linear(x + 1, *weight, out_dtype=torch.float32) * 2

    before = type(kitchen.registry).get_implementation
    expected, compiled = linear(x), torch.compile(linear, fullgraph=True, dynamic=True)
    assert len(calls) == 1
    for n in range(2):
        with products_as_operators(), torch._dynamo.config.patch(error_on_recompile=bool(n)):
            torch.testing.assert_close(compiled(x), expected)
        assert type(kitchen.registry).get_implementation is before
    assert len(calls) == 3


def test_without_a_graph_the_registry_chooses_as_ever(kitchen, engine, calls):
    from comfy_kitchen.backends import eager

    x, weight = torch.randn(8, 256), kitchen.quantize_int8_rowwise(torch.randn(64, 256))
    registry = kitchen.registry
    with engine("inductor.kitchen").products_as_operators():
        arguments = {"x": x, "weight": weight[0], "weight_scale": weight[1]}
        assert registry.get_implementation("int8_linear", kwargs=arguments) is eager.int8_linear
        assert registry.get_implementation("quantize_int8_rowwise") is eager.quantize_int8_rowwise
