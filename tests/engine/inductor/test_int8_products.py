"""ComfyUI's INT8 layers, split for inductor: kitchen's results, each input quantised once. On a CPU its fallback runs."""

import pytest
import torch
from support import compiled_code, relative_error, without_codegen
from torch import nn

pytestmark = pytest.mark.host


@pytest.fixture
def split(everywhere, engine, monkeypatch):
    """Our inductor, which splits the layers on the CPU too."""
    module = engine("inductor.int8_products")
    module.register()
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    return everywhere.inductor


class Block(nn.Module):
    """Three layers with one input, and one after an activation."""

    def __init__(self, convrot, dtype):
        from comfy_kitchen.tensor import QuantizedTensor

        super().__init__()
        torch.manual_seed(0)
        how = {"convrot": True, "convrot_groupsize": 256} if convrot else {}
        for name, rows in (("q", 256), ("k", 64), ("v", 256), ("out", 64)):
            layer = nn.Linear(256, rows, bias=name != "k", dtype=dtype).requires_grad_(False)
            weight = QuantizedTensor.from_float(layer.weight, "TensorWiseINT8Layout", per_channel=True, **how)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            setattr(self, name, layer)

    def forward(self, x):
        x = nn.functional.layer_norm(x, x.shape[-1:])
        return self.q(x), self.k(x), self.out(nn.functional.gelu(self.v(x), approximate="tanh"))


@pytest.mark.parametrize("convrot", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kitchens_result_with_the_product_apart(split, convrot, dtype, monkeypatch):
    graphs, block = without_codegen(monkeypatch), Block(convrot, dtype)
    with torch.inference_mode():
        compiled = torch.compile(block.forward, backend=split, dynamic=True, fullgraph=True)
        for tokens in (40, 24):
            x = torch.randn(2, tokens, 256, dtype=dtype)
            for actual, expected in zip(compiled(x), block(x), strict=True):
                assert relative_error(actual, expected) < (1e-5 if dtype is torch.float32 else 2e-2)
    (graph,) = graphs
    assert "int8_linear" not in graph and graph.count("torch_compile_kit.int8_product") == 4


@pytest.mark.parametrize("rows, columns, left", [(1, 64, True), (16, 64, True), (17, 64, False), (40, 60, True)])
def test_layers_that_stay_with_kitchen(split, rows, columns, left, monkeypatch):
    import comfy_kitchen  # noqa: F401

    ops, graphs = torch.ops.comfy_kitchen, without_codegen(monkeypatch)
    weight, scale = ops.quantize_int8_rowwise(torch.randn(columns, 128))
    x = torch.randn(rows, 128)
    with torch.inference_mode():
        result = torch.compile(lambda x: ops.int8_linear(x, weight, scale, None, 0), backend=split, dynamic=False)(x)
        assert relative_error(result, ops.int8_linear(x, weight, scale, None, 0)) < 1e-5
    assert ("int8_linear" in graphs[0]) == left


def test_an_input_is_rotated_and_quantised_once(split):
    block, x = Block(True, torch.float32), torch.randn(2, 24, 256)
    with torch.inference_mode():
        expected = block(x)
        actual, code = compiled_code(block.forward, split, (x,))
    assert code.count("torch_compile_kit.int8_rotated.default(") == 2  # the norm's result, and the activation's
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) < 1e-3


def test_a_layer_of_another_meaning_stays_kitchens(engine, monkeypatch):
    module = engine("inductor.int8_products")
    assert module._agrees.__wrapped__()
    monkeypatch.setattr(module, "int8_linear", lambda x, weight, *_: x @ weight.float().t())
    assert not module._agrees.__wrapped__()


def test_a_matrix_without_rows_launches_no_kernel(engine, monkeypatch):
    """CUDA refuses to describe such a matrix to the kernel."""
    pytest.importorskip("triton")
    kernels = engine("inductor.int8_kernels")
    monkeypatch.setattr(kernels, "_product", {})
    rows, weight = torch.zeros(0, 16, dtype=torch.int8), torch.zeros(32, 16, dtype=torch.int8)
    assert kernels.product(rows, torch.zeros(0, 1), weight, torch.ones(32), None, torch.half).shape == (0, 32)
