"""CUDA graphs of a model that the host unloads, or whose memory other models need."""

import gc
from types import SimpleNamespace

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from patching import Runs
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def graphs(flux):
    return flux.engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model).graphs


@pytest.mark.parametrize("how", ["with the node", "the node is bypassed", "another branch from before"])
def test_graphs_go_with_the_model(flux, how):
    sibling = flux.patcher.clone()
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    if how != "with the node":
        if how == "the node is bypassed":
            del compiled
            gc.collect()
        flux.run(sibling if how == "another branch from before" else flux.patcher)
    assert graphs(flux), "they stay where the model does"
    comfy.model_management.unload_all_models()
    assert not graphs(flux)
    if not any(graphs.graphs for _, graphs in flux.engine("cuda_graphs.capture").graphs_of.items()):
        assert comfy.model_patcher.ModelPatcher.detach.__code__.co_filename == comfy.model_patcher.__file__, "it is the host's"


def test_graphs_go_with_a_part_of_the_model(flux):
    """As when another model needs room: these weights come back to another place, if at all."""
    flux.run(flux.attach(flux.patcher))
    (loaded,) = [one for one in comfy.model_management.current_loaded_models if one.model.model is flux.patcher.model]
    assert graphs(flux) and not loaded.model_unload(1)
    assert loaded.model is not None and not graphs(flux)


def copied_lora(flux):
    """A weight with a LoRA that was copied, and its list of before."""
    network, in_ram, packed_lora = flux.patcher.model.diffusion_model, [], flux.engine("host.weights.packed_lora")
    weight = network.img_in.weight
    weight.patches = packed_lora._Copies()
    weight.patches.kept_in_ram = in_ram
    flux.engine("cuda_graphs.capture").graphs_of(network).release = packed_lora.release_of(network)
    return weight, in_ram


def test_copies_of_lora_go_where_a_run_lacks_memory(flux):
    flux.run(flux.attach(flux.patcher))
    of_flux = flux.engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model)
    for lack in (of_flux.drop, lambda: of_flux._ran_out_of_memory("a call", "none left")):
        weight, in_ram = copied_lora(flux)
        of_flux.model.obstacle = None
        lack()
        assert weight.patches is in_ram and of_flux.model.obstacle and not of_flux.hold_memory
    of_flux.forget()
    assert [*of_flux.failures.values()] == ["none left"], "the next run copies again, which is a change"
    weight, in_ram = copied_lora(flux)
    of_flux._changed()
    assert weight.patches is not in_ram, "they are for the next capture"


@pytest.mark.parametrize("has_graphs", [True, False])
def test_copies_of_lora_go_with_a_part_of_the_model(flux, has_graphs):
    """Those of packed weights, which the host does not know of."""
    flux.run(flux.attach(flux.patcher))
    (loaded,) = [one for one in comfy.model_management.current_loaded_models if one.model.model is flux.patcher.model]
    weight, in_ram = copied_lora(flux)
    if not has_graphs:
        for _, others in flux.engine("cuda_graphs.capture").graphs_of.items():
            others.forget()
        cpu = torch.device("cpu")
        comfy.model_patcher.ModelPatcher(torch.nn.Identity(), cpu, cpu).partially_unload(cpu)
    assert not loaded.model_unload(1)
    assert weight.patches is in_ram


def test_those_of_another_model_stay(flux, tiny, engine):
    other = Runs(tiny, engine, "flux", cfg=1.0, steps=3)
    for runs in (flux, other):
        runs.run(runs.attach(runs.patcher))
    comfy.model_management.unload_model_and_clones(other.patcher)
    assert graphs(flux) and not graphs(other)


@pytest.fixture
def free(flux, monkeypatch):
    """Sets how many bytes are free beside the models in use."""
    memory = flux.engine("host.graphs.memory")
    return lambda count: monkeypatch.setattr(memory, "_free_beside_models", lambda _device: count)


@pytest.fixture
def other(tiny, engine):
    return Runs(tiny, engine, "flux", cfg=1.0, steps=3)


def test_those_of_an_idle_model_go_when_the_loaded_one_lacks_memory(flux, other, free):
    """As under dynamic VRAM, where the host unloads no model for another."""

    def load_other():
        comfy.model_management.free_memory(0, torch.device("cpu"))  # so the host notes what is idle, for other devices alone
        other.run(other.patcher)

    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    free(1e12)
    load_other()
    assert graphs(flux)
    free(0)
    flux.run(compiled)
    assert graphs(flux), "those of the loaded model itself"
    load_other()
    assert not graphs(flux)


def test_those_of_a_loaded_controlnet_stay(flux, free):
    """A ControlNet's patcher holds the network itself (comfy/controlnet.py)."""
    flux.run(flux.attach(flux.patcher))
    free(0)
    network, device = flux.patcher.model.diffusion_model, torch.device("cpu")
    comfy.model_management.load_models_gpu([comfy.model_patcher.ModelPatcher(network, device, device)])
    assert graphs(flux)


class Pages:
    """What dynamic VRAM holds of a model."""

    def __init__(self, loaded, size, card):
        self.offset, self._loaded, self._card = size, loaded, card

    def loaded_size(self):
        return self._loaded

    def free_memory(self, count):
        self._loaded -= count
        self._card.free += count


class Card:
    """Memory of a card, with the models that the host has loaded there."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch, free, cached=0):
        self.free, self._cached, self.loaded = free, cached, []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (self.free, 480))
        monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: 50)
        monkeypatch.setattr(comfy.model_management, "soft_empty_cache", self.empty_cache)
        monkeypatch.setattr(comfy.model_management, "current_loaded_models", self.loaded)

    def empty_cache(self):
        self.free, self._cached = self.free + self._cached, 0

    def load(self, loaded, size, runs=False, sampled=False, kind="diffusion_model"):
        """A model of which `loaded` bytes are in pages; None: it has none."""
        pages = None if loaded is None else Pages(loaded, size, self)
        model = SimpleNamespace(dynamic_vbars={self.device: pages}, current_patcher=True if sampled else None)
        setattr(model, kind, torch.nn.Identity())
        patcher = SimpleNamespace(model=model, load_device=self.device)
        about = {"currently_used": runs, "model": patcher, "device": self.device, "real_model": lambda: model}
        self.loaded.append(SimpleNamespace(**about))
        return pages, patcher

    def capture(self, patcher, engine):
        """A model that runs has a graph."""
        graphs = engine("cuda_graphs.capture").graphs_of(patcher.model.diffusion_model)
        graphs.model.device, graphs.graphs["key"] = self.device, "graph"
        return graphs.graphs


MODELS = {
    "its pages are not there yet": (dict(loaded=10, size=30, runs=True), 100 + 10 - 30),
    "sampled, though another was loaded after it": (dict(loaded=10, size=30, sampled=True), 100 + 10 - 30),
    "idle": (dict(loaded=10, size=30), 100 + 10),
    "a text encoder": (dict(loaded=10, size=30, runs=True, kind="encoder"), 100),
    "without dynamic VRAM": (dict(loaded=None, size=30, runs=True), 100),
}


@pytest.mark.parametrize("about, expected", MODELS.values(), ids=MODELS)
def test_what_is_free_beside_the_models_that_run(about, expected, engine, monkeypatch):
    card, memory = Card(monkeypatch, free=100), engine("host.graphs.memory")
    card.load(**about)
    assert memory._free_beside_models(card.device) == expected
    assert memory.is_short_of_memory(card.device) == (expected < 480 / 4)
    assert not memory.is_short_of_memory(torch.device("cpu"))


@pytest.mark.parametrize("cached, stays", [(0, False), (30, True)], ids=["all is in use", "PyTorch keeps memory"])
def test_graphs_of_idle_models_go_for_one_that_is_loaded(cached, stays, engine, monkeypatch):
    card, memory = Card(monkeypatch, free=50, cached=cached), engine("host.graphs.memory")
    idle, loaded = card.load(10, 10)[1], card.load(0, 20, runs=True)[1]
    graphs, others = card.capture(idle, engine), card.capture(loaded, engine)
    memory._drop_of_idle(None, models=[loaded], memory_required=1e20)
    assert bool(graphs) == stays and others


ESTIMATES = {
    "there is room": (50, 0, (100, 40, 20, 1)),
    "in what PyTorch keeps": (55, 0, (105, 40, 20, 1)),
    "in pages of another model": (80, 0, (130, 15, 20, 1)),
    "in a graph of another model": (200, 0, (145, 0, 20, 0)),
    "a ControlNet does not tell": (None, 0, (100, 40, 20, 1)),
    "for a LoRA beside it": (50, 30, (130, 15, 20, 1)),
}


@pytest.mark.parametrize("estimate, beside, expected", ESTIMATES.values(), ids=ESTIMATES)
def test_models_that_do_not_run_make_room_for_a_capture(estimate, beside, expected, engine, monkeypatch):
    card = Card(monkeypatch, free=100, cached=5)
    pages, idle = card.load(40, 60)
    own, _patcher = card.load(20, 20, sampled=True)
    graphs, inputs = card.capture(idle, engine), (None, torch.zeros(2, 4, 8, 8), torch.zeros(2))
    network = torch.nn.Identity()
    model = network if estimate is None else SimpleNamespace(memory_required={(2, 4, 8, 8): estimate}.__getitem__)
    loaded = engine("host.weights.blocks").Loaded(model, network, torch.float16, card.device)
    make_room = engine("host.graphs.memory").make_room
    assert make_room(loaded._replace(device=torch.device("cpu")), inputs) and card.free == 100
    assert make_room(loaded, inputs, beside) == (estimate != 200)
    assert (card.free, pages.loaded_size(), own.loaded_size(), len(graphs)) == expected


def test_pages_are_not_taken_where_they_are_too_few(engine, monkeypatch):
    card = Card(monkeypatch, free=10)
    pages, _idle = card.load(40, 60)
    network = torch.nn.Identity()
    model = SimpleNamespace(memory_required=lambda _shape: 100)
    loaded, memory = (
        engine("host.weights.blocks").Loaded(model, network, torch.float16, card.device),
        engine("host.graphs.memory"),
    )
    monkeypatch.setattr(memory, "_idle_graphs", lambda _device: [])  # of models of other tests
    assert not memory.make_room(loaded, (torch.zeros(1),))
    assert pages.loaded_size() == 40


def test_a_capture_does_not_take_the_graphs_of_its_own_model(engine, monkeypatch):
    """A model that another pack calls without having the host load it does not count as running."""
    card = Card(monkeypatch, free=10)
    own = card.load(0, 60)[1]
    graphs, network = card.capture(own, engine), own.model.diffusion_model
    model = SimpleNamespace(memory_required=lambda _shape: 100)
    loaded = engine("host.weights.blocks").Loaded(model, network, torch.float16, card.device)
    assert not engine("host.graphs.memory").make_room(loaded, (torch.zeros(1),)) and graphs


def test_a_pack_that_answers_in_another_way_ends_no_prompt(engine, monkeypatch, caplog):
    card, memory = Card(monkeypatch, free=0), engine("host.graphs.memory")
    monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: None)
    network = torch.nn.Identity()
    assert not memory.make_room(engine("host.weights.blocks").Loaded(network, network, torch.float16, card.device), ())
    memory._drop_of_idle(None, models=[network])
    assert caplog.text.count("the memory of CUDA graphs: ") == 2
