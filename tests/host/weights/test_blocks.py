"""Weights that move: partial loading and paged weights on the CPU, with the host's own code. Graphs, breaks and results."""

import contextlib
import copy
import gc
import threading
import types
from contextlib import ExitStack

import pytest
import torch
from paging import Buffers, own_streams, paged
from patch_kinds.weights import load_partly, lora_file
from patching import Runs, breaks
from patching import shares_code as fresh_dynamo  # noqa: F401
from support import relative_error
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def layer_state(model):
    """What the host keeps on its layers, to see that a run leaves it as found."""
    return {
        name: (sorted(k for k in m.__dict__ if not k.startswith("_v_")), m.comfy_cast_weights, dict(m._parameters))
        for name, m in model.named_modules()
        if hasattr(m, "comfy_cast_weights")
    }


def same_state(one, other):
    return one.keys() == other.keys() and all(
        one[n][:2] == other[n][:2] and all(one[n][2][k] is other[n][2][k] for k in one[n][2]) for n in one
    )


def test_partial_loading_takes_the_graphs_of_full_loading(flux):
    expected = flux.run(flux.patcher)
    assert torch.equal(flux.run(flux.attach(flux.patcher)), expected)
    assert flux.graphs == 2
    for share in (0.6, 0.3, 0.0, 0.8):
        load_partly(flux.patcher, share)
        assert relative_error(flux.run(flux.attach(flux.patcher)), expected) < 1e-6
    assert flux.graphs == 2 and breaks(flux) == 0 and not flux.failures


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("VRAM grow failed: 2")], ids=str)
@pytest.mark.parametrize("place", ["fetch", "resolve"])
def test_weights_that_find_no_room_together_cost_no_image(flux, engine, monkeypatch, place, error):
    """The host has one layer at a time on the device."""
    expected, fetched, calls = flux.run(flux.patcher), engine("host.weights.dynamic_vram").PagedLayers, []
    work, model, compiled = getattr(fetched, place), flux.patcher.model, flux.attach(flux.patcher)

    def full(layers):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise error
        return work(layers)

    with paged(monkeypatch, model) as pages:
        pages.resident = set(pages.layers)
        flux.run(compiled)
        before = layer_state(model)
        monkeypatch.setattr(fetched, place, full)
        for _ in range(2):
            assert relative_error(flux.run(compiled), expected) < 1e-6
        assert len(calls) > 3 and not flux.failures and not pages.pinned
        assert same_state(layer_state(model), before)


def test_a_prefetch_that_finds_no_room_halfway_is_made_again_by_its_block(flux, monkeypatch):
    """The host had begun to fetch the layers of the next block."""
    expected, compiled, calls = flux.run(flux.patcher), flux.attach(flux.patcher), []
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        flux.run(compiled)
        fault = pages.fault

        def full(allocation):
            calls.append(1)
            if len(calls) % 7 == 0:
                raise RuntimeError("Fault failed: 2")
            return fault(allocation)

        monkeypatch.setattr(pages, "fault", full)
        for _ in range(2):
            assert relative_error(flux.run(compiled), expected) < 1e-6
        assert len(calls) > 14 and not flux.failures and not pages.pinned


def test_a_lora_that_finds_no_room_is_applied_when_there_is(flux, monkeypatch):
    """The host notes a page as whole before it adds the LoRA, and would take the weight as it is from then on."""
    import comfy.sd
    from comfy.model_patcher import LowVramPatch

    patched, _ = comfy.sd.load_lora_for_models(flux.patcher, None, lora_file(flux.patcher), 1.0, 0)
    compiled, applied, lacks = flux.attach(flux.patcher), [], []

    class Patch(LowVramPatch):
        def __call__(self, weight):
            applied.append(self.key)
            if lacks:
                lacks.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(weight)

    with paged(monkeypatch, flux.patcher.model) as pages:

        def with_lora():
            pages.resident = set(pages.layers)
            for name, layer in pages.layers.items():
                layer._v_signature, key = None, f"diffusion_model.{name}.weight"
                if key in patched.patches:
                    layer.weight_lowvram_function = Patch(key, patched.patches)
                    layer.weight_lowvram_function._pin_state = {}
            flux.run(compiled)
            return flux.run(compiled)

        expected = with_lora()
        assert applied
        lacks.append(True)
        assert relative_error(with_lora(), expected) == 0 and not lacks
        assert not flux.failures and not pages.pinned


def test_copies_of_a_block_that_does_not_run_are_waited_for(engine, monkeypatch):
    """Else they may arrive after the host has filled the same page and added a LoRA."""
    own_streams(engine, monkeypatch)
    dynamic_vram, waited, device = engine("host.weights.dynamic_vram"), [], torch.device("cpu")
    monkeypatch.setattr(dynamic_vram.comfy.model_management, "sync_stream", lambda _device, stream: waited.append(stream))

    def no_room(*_):
        raise RuntimeError("VRAM grow failed")

    for cast in (no_room, lambda *_: dynamic_vram._streams.of(device)[0]):
        calls = types.SimpleNamespace(cast=cast, clean_up=lambda layers: waited.append("given back"))
        layers = dynamic_vram.PagedLayers([nn.Linear(2, 2)], device, torch.float32, calls)
        with contextlib.suppress(RuntimeError):
            layers.fetch()
        layers.drop()
        assert waited == [dynamic_vram._streams.of(device)[0], "given back"]
        waited.clear()


def test_lora_under_partial_loading_adds_no_graph(flux):
    import comfy.sd

    first, second = lora_file(flux.patcher), lora_file(flux.patcher, seed=2, layers=("linear2",))
    results = {}
    for share in (1.0, 0.5, 0.0):
        if share < 1:
            load_partly(flux.patcher, share)
        flux.run(flux.attach(flux.patcher))
        for name, lora, strength in (("added", first, 1.0), ("stronger", first, 1.5), ("swapped", second, 1.0)):
            patched, _ = comfy.sd.load_lora_for_models(flux.patcher, None, lora, strength, 0)
            result = flux.run(flux.attach(patched))
            assert relative_error(result, flux.run(patched)) < 1e-6, (share, name)
            assert relative_error(result, results.setdefault(name, result)) < 1e-5, (share, name)
        assert relative_error(flux.run(flux.attach(flux.patcher)), flux.run(flux.patcher)) < 1e-6
    assert flux.graphs == 2 and breaks(flux) == 0 and not flux.failures


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("sdxl", {}, marks=pytest.mark.rest),
        ("sdxl", {"compile_when": "in background"}),
        ("flux", {}),
        ("flux", {"only_blocks": "*1"}),
    ],
)
def test_weights_that_were_fetched_ahead_are_those_that_are_used(name, settings, tiny, engine, monkeypatch):
    """Layers between two blocks come through the same two buffers (SDXL's ResBlocks)."""
    own_streams(engine, monkeypatch)
    runs = Runs(tiny, engine, name, cfg=1.0)
    expected = runs.run(runs.patcher)
    compiled = runs.attach(runs.patcher, **settings)
    network, buffers = runs.patcher.model.diffusion_model, Buffers()
    inside = {layer for block in compiled_blocks(runs, compiled) for layer in block.modules()}

    def host_fetches(*_):  # on a CPU it does not
        buffers.of(buffers.stream()).get(2**22, 0).fill_(255)

    with paged(monkeypatch, runs.patcher.model, buffers) as pages:
        hooks = [m.register_forward_pre_hook(host_fetches) for m in network.modules() if hasattr(m, "_v") and m not in inside]
        assert hooks
        try:
            for resident in ([], list(pages.layers)[::2], []):
                pages.resident = set(resident)
                assert relative_error(runs.run(compiled), expected) < 1e-5
                assert engine("background.thread").compiler.wait(120)
        finally:
            for hook in hooks:
                hook.remove()
    assert not runs.failures


def test_the_hosts_streams_are_its_own_again_after_an_error(engine, monkeypatch):
    import comfy.model_management as management

    own_streams(engine, monkeypatch)
    paging, theirs = engine("host.weights.dynamic_vram"), management.get_offload_stream
    seen = []
    with pytest.raises(RuntimeError, match="no memory"), paging._streams.next(torch.device("cpu")):
        seen.append(management.get_offload_stream(torch.device("cpu")))
        thread = threading.Thread(target=lambda: seen.append(management.get_offload_stream(torch.device("cpu"))))
        thread.start()
        thread.join()
        raise RuntimeError("no memory")
    assert isinstance(seen[0], Buffers.Stream) and seen[1] is None, "ours for this thread alone"
    assert management.get_offload_stream is theirs


def compiled_blocks(runs, compiled):
    """The blocks of which the compiled patcher puts the weights in place."""
    settings = runs.engine("host.model.attach").attached_settings(compiled)
    binding = runs.engine("compile.binding").Binding(
        runs.patcher.model.diffusion_model, settings, runs.engine("background.model_call").ModelCall()
    )
    return binding._free


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_paged_weights_take_one_graph_a_kind_whatever_is_resident(name, tiny, engine, monkeypatch):
    runs = Runs(tiny, engine, name, cfg=1.0, length=5 if name == "wan" else 1)
    expected = runs.run(runs.patcher)
    compiled = runs.attach(runs.patcher)
    with paged(monkeypatch, runs.patcher.model) as pages:
        names = list(pages.layers)
        attributes = [sorted(module.__dict__) for module in runs.patcher.model.modules()]
        assert relative_error(runs.run(compiled), expected) < 1e-6  # nothing resident
        assert [sorted(module.__dict__) for module in runs.patcher.model.modules()] == attributes, (
            "something was left on a layer"
        )
        once = runs.graphs
        before = layer_state(runs.patcher.model)
        for resident in (names, names[::2], names[1::2], [], names[:3]):
            pages.resident = set(resident)
            assert relative_error(runs.run(compiled), expected) < 1e-6
        assert pages.faults > len(names) and pages.pinned == 0
        assert same_state(layer_state(runs.patcher.model), before)
    assert once == runs.graphs == len(runs.groups) and breaks(runs) == 0 and not runs.failures


def test_lora_on_paged_weights_adds_no_graph(flux, monkeypatch):
    import comfy.sd
    from comfy.model_patcher import LowVramPatch

    patched, _ = comfy.sd.load_lora_for_models(flux.patcher, None, lora_file(flux.patcher), 1.0, 0)
    plain, expected = flux.run(flux.patcher), flux.run(patched)
    flux.run(flux.patcher)
    compiled = flux.attach(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        flux.run(compiled)
        for resident in ([], list(pages.layers)[::2]):
            pages.resident = set(resident)
            for name, layer in pages.layers.items():
                key = f"diffusion_model.{name}.weight"
                patch = LowVramPatch(key, patched.patches) if key in patched.patches else None
                if patch is not None:
                    patch._pin_state = {}
                layer.weight_lowvram_function = patch
                layer._v_signature = None
            assert relative_error(flux.run(compiled), expected) < 1e-5
            for layer in pages.layers.values():
                layer.weight_lowvram_function, layer._v_signature = None, None
            assert relative_error(flux.run(compiled), plain) < 1e-6
    assert flux.graphs == 2 and breaks(flux) == 0


def test_an_error_in_a_block_leaves_paged_layers_as_found(flux, monkeypatch):
    compiled = flux.attach(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        flux.run(compiled)
        before = layer_state(flux.patcher.model)

        def fail(*_):
            raise KeyError("inside")

        hook = flux.patcher.model.diffusion_model.single_blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            flux.run(compiled)
        hook.remove()
        assert same_state(layer_state(flux.patcher.model), before) and pages.pinned == 0


def test_off_refuses_when_weights_move(flux, engine, monkeypatch):
    compiled = flux.attach(flux.patcher, block_swap="off")
    flux.run(compiled)
    with paged(monkeypatch, flux.patcher.model), pytest.raises(engine("errors").InvalidSetting, match="set block_swap to auto"):
        flux.run(compiled)


def test_eager_linears_keep_the_linear_layers_out(flux, engine, monkeypatch):
    expected = flux.run(flux.patcher)
    compiled = flux.attach(flux.patcher, block_swap="uncompiled linears", only_blocks="single_blocks.*")
    with paged(monkeypatch, flux.patcher.model):
        assert relative_error(flux.run(compiled), expected) < 1e-6
    assert breaks(flux) > 0 and not flux.failures
    assert not any("forward" in m.__dict__ for m in flux.patcher.model.modules())
    assert "Linear layers run uncompiled" in " ".join(engine("host.weights.blocks").notes_on(flux.patcher.model))


class PackedWeight(torch.Tensor):
    """A tensor class of another pack (as GGUF's), which only its own layer knows how to unpack."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result


class UnpackingLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.as_subclass(torch.Tensor) * 1.0, self.bias)


def test_layers_that_unpack_their_own_weights_run_eager_and_are_named(flux, engine):
    for block in flux.patcher.model.diffusion_model.single_blocks:
        layer = block.linear1
        layer.__class__ = UnpackingLinear
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(PackedWeight), requires_grad=False)
        layer._parameters["weight"] = layer.weight.detach().as_subclass(PackedWeight)
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(flux.attach(flux.patcher)), expected) < 1e-6
    assert not flux.failures
    assert "UnpackingLinear" in " ".join(engine("host.weights.blocks").notes_on(flux.patcher.model))


def test_blocks_that_another_pack_moves_are_compiled_as_they_arrive(flux):
    """Hooks around a block that bring its weights and take them away again (WanVideoWrapper, wanBlockswap)."""
    network = flux.patcher.model.diffusion_model
    expected = flux.run(flux.patcher)
    kept = {p: p.detach().clone() for block in network.single_blocks for p in block.parameters()}

    def bring(block, _):
        for p in block.parameters():
            p.data = kept[p].clone()

    def take(block, _, output):
        for p in block.parameters():
            p.data = torch.full_like(p, torch.nan)
        return output

    for block in network.single_blocks:
        take(block, None, None)
        block.register_forward_pre_hook(bring)
        block.register_forward_hook(take)
    assert torch.equal(flux.run(flux.attach(flux.patcher)), expected)
    assert flux.graphs == 2 and not flux.failures
    assert all(p.isnan().all() for p in kept)


def test_a_node_that_removes_blocks(flux):
    """By an object patch, which is on the model when the host asks for the order of its weights."""
    shorter = torch.nn.ModuleList(list(flux.patcher.model.diffusion_model.single_blocks)[:2])

    def pruned(patcher):
        patcher = patcher.clone()
        patcher.add_object_patch("diffusion_model.single_blocks", shorter)
        return patcher

    result = flux.run(pruned(flux.attach(flux.patcher)))
    assert flux.graphs == 2 and not flux.failures
    assert torch.allclose(result, flux.run(pruned(flux.patcher)), atol=1e-4)


def test_weights_are_spread_evenly_over_the_blocks(flux, engine):
    """Whatever prefix of the order stays, every block that moves at all has as many bytes to move, to within a layer."""
    ranks = engine("host.weights.placement").even_ranks(flux.patcher.model)
    sizes = {n: sum(p.nbytes for p in m.parameters(recurse=False)) for n, m in flux.patcher.model.named_modules()}
    network = flux.patcher.model.diffusion_model
    paths = [f"{stack}.{i}" for stack in ("double_blocks", "single_blocks") for i in range(len(getattr(network, stack)))]
    left = {f"diffusion_model.{p}": sum(t.nbytes for t in network.get_submodule(p).parameters()) for p in paths}
    totals, largest = dict(left), max(sizes[name] for name in ranks)
    for _, name in sorted((rank, name) for name, rank in ranks.items()):
        block = next(b for b in left if f"{name}.".startswith(f"{b}."))
        left[block] -= sizes[name]
        begun = [n for b, n in left.items() if n < totals[b]]
        untouched = [n for b, n in left.items() if n == totals[b]]
        assert not begun or max(begun) - min(begun) <= largest
        assert not begun or not untouched or max(untouched) <= max(begun) + largest
    assert not any(left.values())


def on_device(patcher):
    """Bytes of the layers that the host's loader has moved to the device and not taken back."""
    modules = (m for m in patcher.model.modules() if getattr(m, "comfy_patched_weights", False))
    return sum(p.nbytes for m in modules for p in m.parameters(recurse=False))


def test_compiled_and_plain_runs_in_turn_load_no_more_than_one_of_them(flux):
    """Two orders of loading on top of each other would leave more on the device than the host counts: out of memory."""
    load_partly(flux.patcher, 0.5)
    expected = flux.run(flux.patcher)
    compiled = flux.attach(flux.patcher)
    runs = [
        flux.patcher,
        compiled,
        compiled.clone(),
        flux.patcher,
        flux.attach(compiled, block_swap="uncompiled linears"),
        compiled,
    ]
    for patcher in runs:
        assert relative_error(flux.run(patcher), expected) < 1e-6
        counted = flux.patcher.model.model_loaded_weight_memory
        assert 0 < counted < flux.patcher.model_size()
        assert on_device(flux.patcher) <= counted


def test_what_the_host_unloads_in_part_and_loads_again_is_the_same_part(flux):
    load_partly(flux.patcher, 0.6)
    compiled = flux.attach(flux.patcher)
    expected = flux.run(compiled)
    loaded = on_device(flux.patcher)
    for _ in range(2):
        assert compiled.clone().partially_unload(torch.device("cpu"), loaded // 2) > 0
        assert on_device(flux.patcher) < loaded
        assert torch.equal(flux.run(compiled), expected)
        assert on_device(flux.patcher) <= flux.patcher.model.model_loaded_weight_memory
    assert flux.graphs == 2


def listed(patcher):
    """Names of the layers, in the order in which dynamic VRAM takes them."""
    return [name for *_sizes, name, _layer, _parameters in sorted(patcher._load_list(True), key=lambda item: item[:4])]


@pytest.mark.parametrize("method", ["copy", "another class"])
def test_a_copy_of_a_patcher_whose_original_is_gone_is_loaded_evenly(method, flux, engine):
    """Some nodes copy a patcher with `copy.copy`; ComfyUI-GGUF gives each clone the class of its own again."""
    load_partly(flux.patcher, 0.6)
    compiled = flux.attach(flux.patcher)
    expected = flux.run(compiled)
    loaded, other, names = on_device(flux.patcher), compiled.clone(), listed(compiled)
    assert names != listed(flux.patcher)
    other = copy.copy(other) if method == "copy" else other
    if method == "another class":
        other.__class__ = type(flux.patcher)
    del compiled
    gc.collect()
    assert torch.equal(flux.run(other), expected)
    assert listed(other) == names
    assert other.partially_unload(torch.device("cpu"), loaded // 2) > 0
    assert torch.equal(flux.run(other), expected)
    assert on_device(flux.patcher) <= flux.patcher.model.model_loaded_weight_memory < flux.patcher.model_size()


def test_pages_that_a_prompt_without_the_node_has_filled_stay_while_all_are_there(engine):
    """Filled anew they would wait for RAM or the file: seconds of the first image with the node."""
    placement, model = engine("host.weights.placement"), nn.Linear(2, 2)

    class Paged:
        load_device, loaded = torch.device("cpu"), 100

        def __init__(self):
            self.model = model

        def is_dynamic(self):
            return True

        def loaded_size(self):
            return self.loaded

        def model_size(self):
            return 100

    patcher, runs = Paged(), []
    model.dynamic_vbars = {patcher.load_device: "pages of the host"}
    for loaded, left in ((100, True), (60, False)):
        Paged.loaded = loaded
        placement.spread_weights(lambda *_: runs.append(1), patcher)
        assert bool(model.dynamic_vbars) == left
    model.dynamic_vbars[patcher.load_device] = "pages in our order"
    placement.spread_weights(lambda *_: runs.append(1), patcher)
    assert model.dynamic_vbars and len(runs) == 3


@pytest.mark.parametrize("share, buffers", [(2.0, 0.0), (0.5, 2.0), (0.0, 2.0)])
def test_the_host_counts_the_stream_buffers_as_memory_of_sampling(share, buffers, flux, engine, monkeypatch):
    """As much as may be needed: two of the largest block's size, all of which may travel."""
    import comfy.model_management as management

    placement = engine("host.weights.placement")
    patcher, model = flux.patcher, flux.patcher.model
    room = share * patcher.model_size() + management.minimum_inference_memory() - patcher.loaded_size()
    monkeypatch.setattr(management, "get_free_memory", lambda device: room)
    blocks = [*model.diffusion_model.double_blocks, *model.diffusion_model.single_blocks]
    largest = max(management.module_size(block) for block in blocks)
    shape = (1, 16, 64, 64)
    before = model.memory_required(shape)
    with placement._buffers_announced(patcher):
        assert model.memory_required(shape) - before == pytest.approx(buffers * largest, rel=1e-6)
    assert model.memory_required(shape) == before and "memory_required" not in model.__dict__


def test_a_packs_patch_of_the_memory_that_is_required_comes_and_goes(flux, engine, monkeypatch):
    """The host keeps what was there before it: that is ours, if it loads the model in a run."""
    import comfy.model_management as management

    model, placement = flux.patcher.model, engine("host.weights.placement")
    shape, theirs, before = (1, 16, 64, 64), lambda *_args, **_kwargs: 7, flux.patcher.model.memory_required((1, 16, 64, 64))
    patched = flux.patcher.clone()
    patched.add_object_patch("memory_required", theirs)
    for _ in range(2):
        management.unload_all_models()
        with ExitStack() as scopes:
            with monkeypatch.context() as patch:
                patch.setattr(management, "get_free_memory", lambda _device: 0)
                scopes.enter_context(placement._buffers_announced(patched))
            assert model.memory_required(shape) > before
            management.load_models_gpu([patched])
        assert model.memory_required is theirs
        management.unload_all_models()
        assert model.memory_required(shape) == before
    with placement._buffers_announced(flux.patcher):
        assert model.memory_required(shape) >= before
    assert "memory_required" not in model.__dict__


@pytest.mark.parametrize("ours", [False, True])
def test_what_is_loaded_in_part_stays_when_more_is_loaded_in_the_middle_of_a_run(ours, tiny, engine, monkeypatch):
    """As for a ControlNet whose hint goes through a VAE (comfy/controlnet.py, `get_control`)."""
    flux = Runs(tiny, engine, "flux", cfg=1.0)
    patcher = flux.attach(flux.patcher) if ours else flux.patcher.clone()
    device, half, taken_off = patcher.load_device, patcher.model_size() // 2, []
    unpatch_model = type(patcher).unpatch_model

    def unpatched(self, device_to=None, unpatch_weights=True):
        taken_off.extend([self] * unpatch_weights)
        return unpatch_model(self, device_to, unpatch_weights)

    monkeypatch.setattr(type(patcher), "unpatch_model", unpatched)
    for room in (half, 0, half):  # the model's turn, the VAE's, the next image's
        patcher.partially_load(device, room)
    assert patcher.model.model_lowvram and not taken_off
    patcher.unpatch_model(device)
