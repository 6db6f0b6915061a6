"""Weights of ComfyUI-GGUF: unpacked by an operator, so that a block's graph is that of the plain model."""

import contextlib
import functools
import gc
import itertools
import sys
import types
import weakref
from unittest import mock

import pytest
import torch
from capturing import capture_again
from patch_kinds import gguf_pack
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


def code_of(module, layer, kind):
    return module._code_of(gguf_pack.dequantize_tensor, kind, None, torch.float32, module.weight_of(layer).settings)[1]


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
    codes = [code_of(module, layer, kind) for kind in (Kind.TIMES, Kind.OVER)]
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


def test_a_packing_that_failed_is_told_and_compiled_at_the_next_run(flux, engine):
    module, network = engine("host.weights.unpacking"), flux.patcher.model.diffusion_model
    module._code_of.cache_clear()
    settings = engine("settings").CompileSettings(backend="eager")
    compiled = engine("host.model.attach").attach(flux.patcher, settings, "7")
    expected = check(flux, compiled, engine)
    layer = network.single_blocks[0].linear1
    code = code_of(module, layer, layer.weight.tensor_type)
    assert code.name.startswith("unpacking of")
    code.give_up(engine("failures.describe").Failure(code.name, "the disk is full.", "", may_pass=True))
    notes, report = engine("host.model.attach").notes_about(compiled), engine("messages.report").report_json()
    (line,) = (line for line in engine("messages.status").lines.values() if line.node == "7")
    message = code.failure.message()
    assert any(message in note for note in notes)
    assert message in str([model["failures"] for model in report["models"]])
    assert line.now()[:2] == ("failed", ["runsUncompiled", code.name])
    assert relative_error(flux.run(compiled), expected) < 1e-6 and code.failure is None


def test_a_graph_that_is_captured_while_a_packings_code_is_made_is_captured_anew(flux, engine, monkeypatch):
    """Else it would unpack operator by operator, and be kept."""
    capture_again(engine, monkeypatch)
    engine("host.weights.unpacking")._code_of.cache_clear()
    lowering, thread = engine("compile.compiled_code").BlockCode.is_being_lowered.fget, engine("background.thread").compiler
    flux.steps = 3
    compiled, graphs = flux.attach(flux.patcher, compile_when="in background"), []
    held = engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model)
    with monkeypatch.context() as patch:  # as long as the job of a packing waits
        being_made = property(lambda code: code.name.startswith("unpacking") or lowering(code))
        patch.setattr(engine("compile.compiled_code").BlockCode, "is_being_lowered", being_made)
        for _ in range(2):
            flux.run(compiled)
            assert thread.wait(100)
        graphs += held.graphs.values()
        assert graphs and held.graphs, "captured meanwhile"
    flux.run(compiled)
    assert held.graphs and not set(map(id, graphs)) & set(map(id, held.graphs.values()))


def test_cuda_graphs_with_lora_that_the_weights_carry(flux, engine, monkeypatch):
    capture_again(engine, monkeypatch)
    flux.steps = 3
    compiled = flux.attach(flux.patcher, compile_when="before first image")
    held = engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model)
    weight, captures = flux.patcher.model.diffusion_model.single_blocks[0].linear1.weight, []
    flux.patcher.model.diffusion_model.img_in.weight.patches = torch.ones(2)  # what another pack may call so
    lora = torch.ones(1, weight.shape[1]), torch.ones(weight.shape[0], 1), 0.1
    none, host = contextlib.nullcontext, sys.modules["comfy.lora"]
    by_another_pack = functools.partial(mock.patch.object, host, "calculate_weight", OTHERS)
    for patches, patched in (([], none), ([lora], none), ([(*lora[:2], 0.2)], none), ([lora], by_another_pack), ([], none)):
        weight.patches = patches
        expected = flux.run(flux.patcher)
        for _ in range(2):
            with patched():
                assert relative_error(flux.run(compiled), expected) < 1e-6
        captures.append(held.captures)
    more = [after - before for before, after in itertools.pairwise(captures)]
    assert more == [1, 1, 0, 1], engine("host.model.attach").notes_about(compiled)


# A function of another pack.
OTHERS = types.FunctionType(compile("0", "/opt/custom_nodes/other/lora.py", "eval"), {})


def a_layer_with(patches, device="meta"):
    layer, about = GGMLLinear(8, 4, device=device), {"tensor_type": Kind.TIMES, "tensor_shape": (4, 8), "patches": patches}
    layer.weight = nn.Parameter(GGMLTensor(layer.weight.detach(), **about), requires_grad=False)
    return layer


def an_adapter(name, tensors):
    adapters = {adapter.name: adapter for adapter in sys.modules["comfy.weight_adapter"].adapters}
    return adapters[name](set(), (*tensors, 2.0, None, None, None))


def test_lora_of_packed_weights_are_copied_to_them_once(engine):
    module, needed = engine("host.weights.packed_lora"), 4 * (8 + 16 + 32)
    adapter, offset = an_adapter("lora", (torch.ones(4, 2), torch.ones(2, 8))), (0, 1, 2)
    patches = [([(0.5, adapter, 1.0, offset, None), (1.0, ("diff", (torch.ones(4, 8),)), 1.0, None, None)], "key")]
    layer = a_layer_with(patches)
    keep = functools.partial(module.keep_on_device, layer, torch.device("meta"))
    assert keep(lambda bytes: bytes < needed) == "LoRA are copied to packed weights in each step"
    assert layer.weight.patches is patches and module.release_of(layer) is None
    assert keep(lambda bytes: bytes <= needed) is None
    (((strength, moved, model, narrowed, _), (_, (kind, (diff,)), *_)), key) = layer.weight.patches[0]
    assert (strength, model, narrowed, kind, key) == (0.5, 1.0, offset, "diff", "key")
    assert diff.is_meta and [w.is_meta for w in moved.weights[:2]] == [True, True] and moved.weights[2:] == adapter.weights[2:]
    assert not adapter.weights[0].is_meta and type(moved) is type(adapter), "the host's own stay as they are"
    kept = layer.weight.patches
    assert keep(lambda _bytes: False) is None and layer.weight.patches is kept
    layer.weight.to("meta")  # as in an uncompiled call of the layer
    module.release_of(layer)()
    assert layer.weight.patches is patches and module.release_of(layer) is None


def test_graphs_of_copies_that_were_made_in_a_run_stay_in_the_next(engine):
    module, graphs = engine("host.weights.packed_lora"), engine("cuda_graphs.capture").ModelGraphs()
    layer = a_layer_with([([(1.0, (torch.ones(4, 8),), 1.0, None, None)], "key")])

    def look():
        graphs.drop_if_stale(layer, torch.device("cpu"))

    look()
    assert module.keep_on_device(layer, torch.device("meta"), lambda _bytes: graphs.forget() or True) is None
    look()
    graphs.graphs["key"] = "a graph"
    graphs.new_run(is_warming=False)
    look()
    assert graphs.graphs


def has_room(_bytes):
    return True


def test_lora_whose_weights_are_elsewhere_or_lack_memory_stay_in_ram(engine, monkeypatch):
    keep, patches = engine("host.weights.packed_lora").keep_on_device, [([(1.0, (torch.ones(4, 8),), 1.0, None, None)], "key")]
    layers = nn.ModuleList([a_layer_with(patches), nn.Linear(2, 2)])
    assert keep(layers, torch.device("meta"), has_room) and layers[0].weight.patches is patches

    def none_left(tensor, *_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.Tensor, "to", none_left)
    assert keep(layers[0], torch.device("meta"), has_room) and layers[0].weight.patches is patches


def test_lora_that_a_capture_cannot_hold(engine, monkeypatch):
    keep, tensor = engine("host.weights.packed_lora").keep_on_device, torch.ones(4, 8)

    def why_not(value, function=None, layer=a_layer_with):
        return keep(layer([([(1.0, value, 1.0, None, function)], "key")]), torch.device("meta"), has_room)

    assert why_not((tensor,)) is None and why_not(an_adapter("lora", (tensor, tensor))) is None
    assert why_not((tensor,), OTHERS) and why_not(an_adapter("oft", (tensor, tensor)))  # it asks for a norm
    monkeypatch.setattr(sys.modules["comfy.lora"], "calculate_weight", OTHERS)
    assert why_not((tensor,)) and why_not(None, layer=lambda _patches: nn.Linear(2, 2)) is None


def test_a_pack_that_is_given_settings_unpacks_by_them(flux, engine, monkeypatch):
    """As a branch of ComfyUI-GGUF, in place of the dtype (03e0e54, dequant.py)."""
    whole = gguf_pack.dequantize_tensor

    def dequantize_tensor(tensor, dtype=None, settings=None):
        return whole(tensor, dtype, settings["dtype"])

    named = types.FunctionType(dequantize_tensor.__code__, vars(gguf_pack), "f", (None, None), dequantize_tensor.__closure__)
    monkeypatch.setattr(gguf_pack, "dequantize_tensor", named)
    monkeypatch.setattr(GGMLLinear, "dequant_dtype", {"dtype": None})
    check(flux, flux.attach(flux.patcher), engine)


def test_a_fork_that_unpacks_in_another_way_is_believed(flux, engine, monkeypatch, caplog):
    """Its layers look like the pack's."""
    engine("host.weights.unpacking")._code_of.cache_clear()
    plain, whole = flux.run(flux.patcher), gguf_pack.dequantize_tensor

    def dequantize_tensor(tensor, dtype=None, dequant_dtype=None):
        values = whole(tensor, dtype, dequant_dtype)
        return values if tensor.tensor_type is Kind.F32 else values * 1.25

    named = types.FunctionType(dequantize_tensor.__code__, vars(gguf_pack), "f", (None, None), dequantize_tensor.__closure__)
    monkeypatch.setattr(gguf_pack, "dequantize_tensor", named)
    assert relative_error(check(flux, flux.attach(flux.patcher), engine), plain) > 1e-3
    assert "in a way of its own" in caplog.text


def test_a_forks_forward_is_called_and_each_way_of_packing_is_told_apart(flux, engine):
    """Not by the guards of PyTorch 2.13 and newer, as weight and bias both have a kind: there the layers run uncompiled."""

    class Fork(GGMLLinear):
        def forward_comfy_cast_weights(self, input):
            return super().forward_comfy_cast_weights(input) * 1.5

    plain = flux.run(flux.patcher)
    for block in flux.patcher.model.diffusion_model.single_blocks:
        block.linear1.__class__ = Fork
    expected, compiled = flux.run(flux.patcher), flux.attach(flux.patcher)
    assert relative_error(plain, expected) > 1e-3
    for _ in range(2):
        assert relative_error(flux.run(compiled), expected) < 1e-6
    assert not flux.failures


def test_a_forks_get_weight_that_calls_its_parents_is_called_with_it(flux, engine):
    class Fork(GGMLLinear):
        def get_weight(self, tensor, dtype):
            return super().get_weight(tensor, dtype) * 1.0

    for block in flux.patcher.model.diffusion_model.single_blocks:
        block.linear1.__class__ = Fork
    # Blocks are packed in two ways: from PyTorch 2.13 on a graph that unpacks one runs for the other, too: a guard is missing.
    check(flux, flux.attach(flux.patcher), engine)
    layer = flux.patcher.model.diffusion_model.single_blocks[0].linear1
    weight = engine("host.weights.unpacking").weight_of(layer).unpacked(torch.float32)
    assert torch.equal(weight, layer.get_weight(layer.weight, torch.float32))
