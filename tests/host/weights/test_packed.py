"""Weights that another pack keeps packed (GGUF), with layers that unpack them: traced into the blocks' graphs."""

import functools

import pytest
import torch
from capturing import trust
from patch_kinds.gguf_pack import GGMLTensor, Kind, packed
from patch_kinds.packed import PackedLinear, StubbornLinear, pack
from patching import Runs, breaks
from support import compile_settings, relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

MODES = ["in background", pytest.param("before first image", marks=pytest.mark.rest)]


@pytest.fixture
def flux(tiny, engine):
    """Of two kinds of packed blocks; the other blocks are left out."""
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.attach = functools.partial(runs.attach, only_blocks="single_blocks.*")
    pack(runs.patcher)
    return runs


def test_unpacking_is_part_of_the_graph_one_for_each_kind(flux):
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(flux.attach(flux.patcher)), expected) < 1e-6
    assert (flux.graphs, breaks(flux), flux.failures) == (2, 0, [])
    assert flux.run(flux.attach(flux.patcher)) is not None and flux.graphs == 2


def test_code_is_made_for_them_in_the_background(flux, engine):
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, compile_when="in background")
    for _ in range(3):
        assert relative_error(flux.run(compiled), expected) < 1e-6
        assert engine("background.thread").compiler.wait(100)
    assert (flux.graphs, breaks(flux), flux.failures) == (2, 0, [])


@pytest.mark.parametrize("compile", MODES)
def test_a_layer_whose_unpacking_does_not_compile_runs_eager_and_the_rest_of_the_block_compiled(flux, engine, compile):
    pack(flux.patcher, layer_class=StubbornLinear)
    packed = engine("host.weights.traceable_layers")
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, compile_when=compile)
    try:
        assert relative_error(flux.run(compiled), expected) < 1e-6
        assert breaks(flux) > 0 and not flux.failures  # the block is several graphs
        assert engine("background.thread").compiler.wait(100)
        assert relative_error(flux.run(compiled), expected) < 1e-6
    finally:
        packed.untraceable.clear()


@pytest.mark.parametrize("compile", MODES)
def test_where_a_block_cannot_be_lowered_with_its_packed_layers_it_is_traced_without_them(flux, engine, compile):
    packed, calls = engine("host.weights.traceable_layers"), []

    def backend(graph, _inputs):
        calls.append(graph)
        if len(calls) == 1:
            raise RuntimeError("no kernel for this")
        return graph.forward

    expected = flux.run(flux.patcher)
    settings = compile_settings(engine, backend=backend, compile_when=compile, only_blocks="single_blocks.*")
    compiled = engine("host.model.attach").attach(flux.patcher, settings)
    try:
        for _ in range(3):
            assert relative_error(flux.run(compiled), expected) < 1e-6
            assert engine("background.thread").compiler.wait(100)
        assert packed.untraceable and not flux.failures and breaks(flux) > 0
        name = next(iter(packed.untraceable)).__name__
        assert name in " ".join(engine("host.weights.blocks").notes_on(flux.patcher.model))
    finally:
        packed.untraceable.clear()


def test_a_limit_on_variants_says_nothing_against_the_layers(flux, engine):
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, cache_limit=1)
    assert relative_error(flux.run(compiled), expected) < 1e-6
    untraceable = set(engine("host.weights.traceable_layers").untraceable)
    engine("host.weights.traceable_layers").untraceable.clear()
    assert any(group.code.limit_reached for group in flux.groups) and not untraceable


def test_a_lora_that_such_a_tensor_carries(flux):
    compiled, generator = flux.attach(flux.patcher), torch.Generator().manual_seed(5)
    flux.run(compiled)
    weights = [block.linear2.weight for block in flux.patcher.model.diffusion_model.single_blocks]
    plain, graphs = flux.run(flux.patcher), []
    for strength, seed in ((1.0, 1), (1.5, 1), (1.5, 2), (0.5, 2)):
        generator.manual_seed(seed)
        for weight in weights:
            height, width = weight.shape
            down, up = (torch.randn(size, generator=generator) * 0.1 for size in ((4, width), (height, 4)))
            weight.patches = ((down, up, strength),)
        expected = flux.run(flux.patcher)
        assert relative_error(flux.run(compiled), expected) < 1e-6 and relative_error(plain, expected) > 1e-3
        graphs.append(flux.graphs)
    for weight in weights:
        weight.patches = ()
    assert relative_error(flux.run(compiled), plain) < 1e-6
    assert graphs[1:] == [graphs[1]] * 3 and flux.graphs == graphs[1], "no graph by strength and by another LoRA"
    assert breaks(flux) == 0 and not flux.failures


def test_what_is_elsewhere_arrives_as_packed_as_it_is(engine):
    layer = PackedLinear(64, 8)
    layer.weight = packed(layer.weight, Kind.OVER)
    weights = engine("host.weights.traceable_layers").PackedWeights([layer], torch.device("meta"), compile_settings(engine))
    ((module, found),) = weights.resolve()
    assert weights.move and module is layer and isinstance(found["weight"], GGMLTensor)
    assert found["weight"].is_meta and found["weight"].tensor_type is Kind.OVER and found["weight"].shape == (8, 64)
    assert found["weight"].untyped_storage().nbytes() == layer.weight.untyped_storage().nbytes()
    here = engine("host.weights.traceable_layers").PackedWeights([layer], torch.device("cpu"), compile_settings(engine))
    assert not here.move and here.resolve() == []


def test_a_cuda_graph_knows_what_a_packed_tensor_carries(engine, monkeypatch):
    trust(engine, monkeypatch, "packed.py")
    state = engine("cuda_graphs.model_state").ModelState()
    layer, forgotten = PackedLinear(64, 8), []
    layer.weight = packed(layer.weight, Kind.OVER)
    for changes in (None, "a LoRA", None, "its memory", None):
        if changes == "a LoRA":
            layer.weight.patches = ((torch.ones(4, 64), torch.ones(8, 4), 1.0),)
        elif changes == "its memory":
            layer.weight.patches[0][0].data = torch.ones(4, 64)
        before = len(forgotten)
        state.new_run()
        state.check_unchanged(layer, torch.device("cpu"), None, lambda: forgotten.append(1))
        assert (len(forgotten) > before) == (changes is not None or before == 0)
