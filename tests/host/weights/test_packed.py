"""Weights that another pack keeps packed (GGUF), with layers that unpack them: traced into the blocks' graphs."""

import functools

import pytest
import torch
from patching import Runs
from support import relative_error
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
BLOCK = 32


class Packed(torch.Tensor):
    """As that pack has it: attributes, methods of its own in PyTorch's names, and a shape that is not that of its data."""

    def __new__(cls, data, *_):
        return super().__new__(cls, data)

    def __init__(self, data, kind, unpacked, lora=()):
        super().__init__()
        self.kind, self.unpacked, self.lora = kind, unpacked, lora

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.kind, moved.unpacked, moved.lora = self.kind, self.unpacked, self.lora
        return moved

    def clone(self, *_, **__):
        return self

    def detach(self, *_, **__):
        return self

    @property
    def shape(self):
        return self.unpacked if hasattr(self, "unpacked") else self.size()


def packed(weight, kind):
    """Blocks of numbers in a byte each, behind half a float that scales them; `kind`: how that float is meant."""
    blocks = weight.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 100
    numbers = (blocks / scale).round().to(torch.int8)
    kept = (scale if kind == "times" else 1 / scale).half()
    data = torch.cat([kept.view(torch.uint8), numbers.view(torch.uint8)], 1)
    return Packed(data.reshape(weight.shape[0], -1), kind, weight.shape)


def unpacked(weight):
    blocks = weight.data.reshape(-1, BLOCK + 2).view(torch.uint8)
    scale, numbers = blocks[:, :2].view(torch.half), blocks[:, 2:].view(torch.int8)
    values = numbers * scale if weight.kind == "times" else numbers / scale
    plain = values.reshape(weight.shape).float()
    for down, up, strength in weight.lora:
        plain = plain + strength * (up @ down)
    return plain


class PackedLinear(nn.Linear):
    comfy_cast_weights = True

    def forward(self, x):
        return nn.functional.linear(x, torch.Tensor(unpacked(self.weight.to(x.device))), self.bias)


class StubbornLinear(PackedLinear):
    """PyTorch gives up in the middle of it."""

    def forward(self, x):
        return nn.functional.linear(x, unpacked(self.weight.to(x.device)).as_subclass(torch.Tensor), self.bias)


def pack(patcher, kinds=("times", "over"), layer_class=PackedLinear):
    """The Linear layers of each single block, in turn of these kinds; they look alike from outside."""
    for number, block in enumerate(patcher.model.diffusion_model.single_blocks):
        for layer in (block.linear1, block.linear2):
            layer.__class__ = layer_class
            if not isinstance(layer.weight, Packed):
                layer.weight = nn.Parameter(packed(layer.weight.detach(), kinds[number % len(kinds)]), requires_grad=False)


@pytest.fixture
def flux(tiny, engine):
    """Of two kinds of packed blocks; the other blocks are left out."""
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.attach = functools.partial(runs.attach, only_blocks="single_blocks.*")
    pack(runs.patcher)
    return runs


def breaks(runs):
    return sum(group.stats.graph_breaks for group in runs.groups)


def test_unpacking_is_part_of_the_graph_one_for_each_kind(flux):
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(flux.attach(flux.patcher)), expected) < 1e-6
    assert (flux.graphs, breaks(flux), flux.failures) == (2, 0, [])
    assert flux.run(flux.attach(flux.patcher)) is not None and flux.graphs == 2


def test_code_is_made_for_them_in_the_background(flux, engine):
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, compile="in the background")
    for _ in range(3):
        assert relative_error(flux.run(compiled), expected) < 1e-6
        assert engine("background.thread").compiler.wait(100)
    assert (flux.graphs, breaks(flux), flux.failures) == (2, 0, [])


@pytest.mark.parametrize("compile", ["at once", "in the background"])
def test_a_layer_whose_unpacking_does_not_compile_runs_eager_and_the_rest_of_the_block_compiled(flux, engine, compile):
    pack(flux.patcher, layer_class=StubbornLinear)
    packed = engine("host.weights.packed")
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, compile=compile)
    try:
        for _ in range(6):  # tried with the layers, made without them, and found to need a call
            assert relative_error(flux.run(compiled), expected) < 1e-6
            assert engine("background.thread").compiler.wait(100)
            if breaks(flux):
                break
        assert breaks(flux) > 0 and not flux.failures
        if compile == "in the background":  # else the block is several graphs, and nothing has failed
            assert packed.untraceable == {StubbornLinear}
            assert "StubbornLinear" in " ".join(engine("host.weights.blocks").notes_on(flux.patcher.model))
    finally:
        packed.untraceable.clear()


def test_a_limit_on_variants_says_nothing_against_the_layers(flux, engine):
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, cache_limit=1)
    assert relative_error(flux.run(compiled), expected) < 1e-6
    untraceable = set(engine("host.weights.packed").untraceable)
    engine("host.weights.packed").untraceable.clear()
    assert any(group.limit_reached for group in flux.groups) and not untraceable


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
            weight.lora = ((down, up, strength),)
        expected = flux.run(flux.patcher)
        assert relative_error(flux.run(compiled), expected) < 1e-6 and relative_error(plain, expected) > 1e-3
        graphs.append(flux.graphs)
    for weight in weights:
        weight.lora = ()
    assert relative_error(flux.run(compiled), plain) < 1e-6
    assert graphs[1:] == [graphs[1]] * 3 and flux.graphs == graphs[1], "no graph by strength and by another LoRA"
    assert breaks(flux) == 0 and not flux.failures


def test_what_is_elsewhere_arrives_as_packed_as_it_is(engine):
    layer = PackedLinear(64, 8)
    layer.weight = nn.Parameter(packed(layer.weight.detach(), "over"), requires_grad=False)
    weights = engine("host.weights.packed").PackedWeights([layer], torch.device("meta"))
    ((module, found),) = weights.resolve()
    assert weights.move and module is layer and isinstance(found["weight"], Packed)
    assert found["weight"].is_meta and found["weight"].kind == "over" and found["weight"].shape == (8, 64)
    assert found["weight"].untyped_storage().nbytes() == layer.weight.untyped_storage().nbytes()
    here = engine("host.weights.packed").PackedWeights([layer], torch.device("cpu"))
    assert not here.move and here.resolve() == []


def test_a_cuda_graph_knows_what_a_packed_tensor_carries(engine):
    state = engine("cuda_graphs.model_state").ModelState()
    layer, forgotten = PackedLinear(64, 8), []
    layer.weight = nn.Parameter(packed(layer.weight.detach(), "over"), requires_grad=False)
    for changes in (False, True, False):
        if changes:
            layer.weight.lora = ((torch.ones(4, 64), torch.ones(8, 4), 1.0),)
        before = len(forgotten)
        state.new_run()
        state.look_at(layer, torch.device("cpu"), None, lambda: forgotten.append(1))
        assert (len(forgotten) > before) == (changes or before == 0)
