"""Weights of ComfyUI-GGUF: unpacked by an operator, so that a block's graph is that of the plain model."""

import gc
import weakref

import pytest
import torch
from patch_kinds.gguf_pack import GGMLLinear, GGMLTensor, Kind, pack
from patching import Runs
from support import relative_error
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

MODES = ["in background", pytest.param("before first image", marks=pytest.mark.rest)]


@pytest.fixture
def flux(tiny, engine):
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    pack(runs.patcher)
    return runs


def check(flux, compiled, engine):
    """The image is right, uncompiled and compiled."""
    expected = flux.run(flux.patcher)
    for _ in range(2):
        assert relative_error(flux.run(compiled), expected) < 1e-6
        assert engine("background.thread").compiler.wait(100)
    assert not flux.failures and sum(group.stats.graph_breaks for group in flux.groups) == 0
    return expected


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_a_kind_of_block_whatever_the_packing_and_the_lora(flux, engine, mode):
    compiled, generator = flux.attach(flux.patcher, compile_when=mode), torch.Generator().manual_seed(5)
    plain = check(flux, compiled, engine)
    assert flux.graphs == 2, "double blocks, and single blocks of both packings"
    weights = [block.linear2.weight for block in flux.patcher.model.diffusion_model.single_blocks]
    for strength in (1.0, 0.5):
        for weight in weights:
            height, width = weight.shape
            down, up = (torch.randn(size, generator=generator) * 0.1 for size in ((4, width), (height, 4)))
            weight.patches = ((down, up, strength),)
        assert relative_error(check(flux, compiled, engine), plain) > 1e-3
    for weight in weights:
        weight.patches = ()
    assert relative_error(check(flux, compiled, engine), plain) == 0
    assert flux.graphs == 2


@pytest.mark.parametrize("mode", MODES)
def test_norms_whose_weights_are_of_the_packs_class(flux, engine, mode):
    """So the host loads a GGUF file where weights stream: what such a norm returns is of that class too."""
    norms = [m for m in flux.patcher.model.diffusion_model.modules() if type(m).__name__ == "RMSNorm"]
    for norm in norms:
        scale = GGMLTensor(norm.weight.detach(), tensor_type=Kind.F32, tensor_shape=norm.weight.shape)
        norm.weight = nn.Parameter(scale, requires_grad=False)
    weights = [norm.weight for norm in norms]
    check(flux, flux.attach(flux.patcher, compile_when=mode), engine)
    assert flux.graphs == 2 and all(norm.weight is weight for norm, weight in zip(norms, weights, strict=True))


def test_each_packing_is_compiled_once(flux, engine):
    module, layer = engine("host.weights.unpacking"), flux.patcher.model.diffusion_model.single_blocks[0].linear1
    module._code_of.cache_clear()  # of tests before
    check(flux, flux.attach(flux.patcher), engine)
    dequantize, settings = module._names_of(layer)["dequantize"], module.weight_of(layer).settings
    codes = [module._code_of(dequantize, kind, None, torch.float32, settings)[1] for kind in (Kind.TIMES, Kind.OVER)]
    assert [code.stats.graphs for code in codes] == [1, 1], "for weights of all sizes"


def test_layers_are_left_as_they_were(flux, engine):
    layer = flux.patcher.model.diffusion_model.single_blocks[0].linear1
    bias = layer.bias
    check(flux, flux.attach(flux.patcher), engine)
    assert not {"forward_comfy_cast_weights", "torch_compile_kit_number"} & set(vars(layer)) and layer.bias is bias


def test_a_layer_is_freed(engine):
    module = engine("host.weights.unpacking")
    layer = GGMLLinear(32, 4)
    layer.weight = nn.Parameter(
        GGMLTensor(torch.zeros(4, 34, dtype=torch.uint8), tensor_type=Kind.TIMES, tensor_shape=(4, 32)), requires_grad=False
    )
    freed = weakref.ref(layer), weakref.ref(module.weight_of(layer))
    assert module.weight_of(layer) is freed[1]()
    del layer
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


def test_a_layer_that_is_not_known_is_traced(flux, engine):
    known = engine("host.weights.unpacking").has_known_unpacking
    layer = flux.patcher.model.diffusion_model.single_blocks[0].linear1
    assert known(layer)
    layer.weight.tensor_type = Kind.F32
    assert not known(layer) and not known(nn.Linear(4, 4))


def test_a_packing_that_failed_is_compiled_at_the_next_loading_in_a_folder_of_the_cache(flux, engine):
    module, layer = engine("host.weights.unpacking"), flux.patcher.model.diffusion_model.single_blocks[0].linear1
    module._code_of.cache_clear()
    check(flux, flux.attach(flux.patcher), engine)
    settings, kind = module.weight_of(layer).settings, layer.weight.tensor_type
    code = module._code_of(module._names_of(layer)["dequantize"], kind, None, torch.float32, settings)[1]
    assert len(code.folder[0]) == 12 and code.folder[1].startswith("unpacking of"), "told in the report, trimmed and cleared"
    code.failure = engine("failures.describe").Failure("a packing", "the disk is full", "", may_pass=True)
    engine("host.weights.traceable_layers").PackedWeights([layer], torch.device("cpu"), settings)
    assert code.failure is None


def test_a_forks_get_weight_that_calls_its_parents_is_called_with_it(flux, engine):
    class Fork(GGMLLinear):
        def get_weight(self, tensor, dtype):
            return super().get_weight(tensor, dtype) * 1.0

    for block in flux.patcher.model.diffusion_model.single_blocks:
        block.linear1.__class__ = Fork
    check(flux, flux.attach(flux.patcher), engine)
    layer = flux.patcher.model.diffusion_model.single_blocks[0].linear1
    weight = engine("host.weights.unpacking").weight_of(layer).unpacked(torch.float32)
    assert torch.equal(weight, layer.get_weight(layer.weight, torch.float32))
