"""GELU inside the matrix product before it."""

import pytest
import torch
from patching import Runs
from support import compiled_code
from torch.nn import functional

pytestmark = pytest.mark.host
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
def test_gelu_goes_into_the_product_before_it(shape, dtype, everywhere):
    net, x = Perceptron(dtype=dtype), torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    with torch.inference_mode():
        expected = net(x)
        actual, code = compiled_code(net, everywhere.inductor, (x,))
    assert "_addmm_activation" in code
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "net", [Perceptron("none"), Perceptron(bias=False), Perceptron(dtype=torch.float32), Needed()],
    ids=["exact", "no bias", "fp32", "needed by others"],
)  # fmt: skip
def test_other_products_stay_as_they_are(net, everywhere):
    x = torch.randn(2, 6, DIM).to(net.wide.weight.dtype)
    with torch.inference_mode():
        _, code = compiled_code(net, everywhere.inductor, (x,))
    assert "_addmm_activation" not in code


def test_who_tunes_products_gets_inductors_own(everywhere, monkeypatch):
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
    net, x = Perceptron(), torch.randn(2, DIM).bfloat16().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=everywhere.inductor)(x)
    compiled.sum().backward()
    assert x.grad.abs().sum() > 0


def test_a_product_with_gelu_serves_all_sizes_and_is_kept_on_disk(everywhere):
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    net = Perceptron()
    with torch.inference_mode(), fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(net, backend=everywhere.inductor, dynamic=True, fullgraph=True)
            for shape in ((2, 6, DIM), (3, 9, DIM), (2, 30, DIM)):
                x = torch.randn(shape).bfloat16()
                torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)
            assert counters["stats"]["unique_graphs"] == 1 and not counters["aot_autograd"]["autograd_cache_bypass"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.parametrize(("name", "least"), [("flux", 2), ("qwen_image", 2), ("wan", 1)])
def test_the_hosts_transformers_have_it(name, least, tiny, engine, monkeypatch):
    epilogues, found = engine("inductor.linear_gelu"), []
    monkeypatch.setattr(epilogues, "_DTYPES", (torch.float32,))

    def backend(graph, _inputs):
        epilogues.gelu_in_linear(graph.graph)
        found.append(str(graph.graph).count("_addmm_activation"))
        return graph

    torch._dynamo.register_backend(backend, name=f"counts_gelu_{name}")
    runs = Runs(tiny, engine, name, cfg=1.0, steps=1)
    settings = engine("settings").CompileSettings(backend="eager", compile="at once")
    object.__setattr__(settings, "backend", f"counts_gelu_{name}")
    with torch.inference_mode():
        runs.run(engine("host.model.attach").attach(runs.patcher, settings))
    assert max(found) >= least, found
