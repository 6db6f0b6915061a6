"""GELU inside the matrix product before it."""

import pytest
import torch
from support import without_codegen
from torch.nn import functional

DIM = 16


@pytest.fixture
def everywhere(engine, monkeypatch):
    """On the CPU too."""
    module = engine("inductor.backend")
    monkeypatch.setattr(module, "_fuses", lambda device: True)
    return module


class Perceptron(torch.nn.Module):
    def __init__(self, approximate="tanh", bias=True, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.wide, self.narrow = torch.nn.Linear(DIM, 4 * DIM, bias), torch.nn.Linear(4 * DIM, DIM)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        self.to(dtype).requires_grad_(False)
        self.approximate = approximate

    def forward(self, x):
        return self.narrow(functional.gelu(self.wide(x), approximate=self.approximate))


class Needed(Perceptron):
    def forward(self, x):
        wide = self.wide(x)
        return self.narrow(functional.gelu(wide, approximate="tanh")) + wide.sum()


@pytest.mark.parametrize("shape", [(6, DIM), (2, 6, DIM), (2, 3, 4, DIM)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_goes_into_the_product_before_it(shape, dtype, everywhere, monkeypatch):
    graphs = without_codegen(monkeypatch)
    net, x = Perceptron(dtype=dtype), torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.inference_mode():
        expected = net(x)
        actual = torch.compile(net, backend=everywhere.inductor)(x)
    assert len(graphs) == 1 and "_addmm_activation" in graphs[0]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "net", [Perceptron("none"), Perceptron(bias=False), Perceptron(dtype=torch.float32), Needed()],
    ids=["exact", "no bias", "fp32", "needed by others"],
)  # fmt: skip
def test_other_products_stay_as_they_are(net, everywhere, monkeypatch):
    graphs = without_codegen(monkeypatch)
    x = torch.randn(2, 6, DIM).to(net.wide.weight.dtype)
    with torch.inference_mode():
        expected = net(x)
        torch.testing.assert_close(torch.compile(net, backend=everywhere.inductor)(x), expected, rtol=2e-2, atol=2e-2)
    assert len(graphs) == 1 and "_addmm_activation" not in graphs[0]


def test_who_tunes_products_gets_inductors_own(everywhere, monkeypatch):
    without_codegen(monkeypatch)
    asked = []
    monkeypatch.setattr(everywhere, "gelu_in_linear", lambda graph: asked.append(graph))
    for options in ({}, {"max_autotune": True}):
        torch._dynamo.reset()
        with torch.inference_mode():
            torch.compile(Perceptron(), backend=lambda *a, o=options: everywhere.inductor(*a, options=o))(
                torch.randn(2, DIM).bfloat16()
            )
    assert len(asked) == 1


def test_products_with_a_derivative_stay(everywhere, monkeypatch):
    """GELU inside a product has none."""
    graphs = without_codegen(monkeypatch)
    net, x = Perceptron(), torch.randn(2, DIM).bfloat16().requires_grad_()
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    (actual,) = torch.autograd.grad(torch.compile(net, backend=everywhere.inductor)(x).sum(), x)
    assert expected.any() and graphs and not any("_addmm_activation" in graph for graph in graphs)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_a_product_with_gelu_serves_all_sizes_and_is_kept_on_disk(everywhere):
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache, run_and_get_code

    net, written = Perceptron(), []
    inputs = [torch.randn(shape).bfloat16() for shape in ((2, 6, DIM), (3, 9, DIM), (2, 30, DIM))]
    with torch.inference_mode(), fresh_cache():
        expected = [net(x) for x in inputs]
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(net, backend=everywhere.inductor, dynamic=True, fullgraph=True)
            actual, code = run_and_get_code(lambda compiled=compiled: [compiled(x) for x in inputs])
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            written += code
            assert counters["stats"]["unique_graphs"] == 1 and not counters["aot_autograd"]["autograd_cache_bypass"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert written and all("_addmm_activation" in source for source in written)
