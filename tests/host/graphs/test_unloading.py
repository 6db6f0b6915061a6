"""CUDA graphs of a model that the host unloads, or whose memory other models need."""

import gc

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


def test_those_of_a_model_without_the_node_go_when_it_lacks_memory(flux, free):
    flux.run(flux.attach(flux.patcher))
    free(1e12)
    flux.run(flux.patcher)
    assert graphs(flux)
    free(0)
    flux.run(flux.patcher)
    assert not graphs(flux)


def test_those_of_a_loaded_controlnet_stay(flux, free):
    """A ControlNet's patcher holds the network itself (comfy/controlnet.py)."""
    flux.run(flux.attach(flux.patcher))
    free(0)
    network, device = flux.patcher.model.diffusion_model, torch.device("cpu")
    comfy.model_management.load_models_gpu([comfy.model_patcher.ModelPatcher(network, device, device)])
    assert graphs(flux)


def test_those_of_others_go_when_a_capture_lacks_memory(flux, other, engine, monkeypatch):
    flux.run(flux.attach(flux.patcher))

    def capture(self, key, *_args):
        return self._ran_out_of_memory(key, "out of memory")

    monkeypatch.setattr(engine("cuda_graphs.capture").ModelGraphs, "_capture", capture)
    other.run(other.attach(other.patcher))
    assert not graphs(flux) and not graphs(other)


@pytest.mark.parametrize("enabled, expected", [(True, 100 + 50 - 30), (False, 100)])
def test_pages_count_as_free_and_the_weights_in_use_that_are_paged_as_used(enabled, expected, engine, monkeypatch):
    import comfy.memory_management
    import comfy_aimdo.model_vbar

    class Patcher:
        def __init__(self, size, dynamic):
            self.model_size, self.is_dynamic = lambda: size, lambda: dynamic

    class Loaded:
        device = torch.device("cuda", 0)

        def __init__(self, used, *model):
            self.currently_used, self.model = used, Patcher(*model)
            self.real_model = lambda: self.model

    loaded = [Loaded(True, 30, True), Loaded(True, 1000, False), Loaded(False, 2000, True)]
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", loaded)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", enabled)
    monkeypatch.setattr(comfy_aimdo.model_vbar, "vbars_analyze", lambda _index: 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100, 480))
    memory = engine("host.graphs.memory")
    assert memory._free_beside_models(Loaded.device) == expected
    assert memory.is_short_of_memory(Loaded.device) == (expected < 480 / 4)
    assert not memory.is_short_of_memory(torch.device("cpu"))


@pytest.fixture
def card(monkeypatch):
    """A card with 100 bytes free, of which the host keeps 50; what the host is asked to free."""
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100, 480))
    monkeypatch.setattr(comfy.model_management, "minimum_inference_memory", lambda: 50)
    monkeypatch.setattr(comfy.model_management, "free_memory", lambda *args, keep_loaded: asked.append((*args, keep_loaded)))
    return asked


@pytest.mark.parametrize("estimate, expected", [(49, []), (51, [101]), (None, [])])
def test_models_that_do_not_run_make_room_for_a_capture(estimate, expected, card, engine, monkeypatch):
    class Model:
        def memory_required(self, shape):
            assert shape == (2, 4, 8, 8)
            return estimate

    class Loaded:
        def __init__(self, used):
            self.currently_used = used

    loaded = [Loaded(True), Loaded(False)]
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", loaded)
    network, device = torch.nn.Identity(), torch.device("cuda", 0)
    model = network if estimate is None else Model()  # a ControlNet says nothing of what it needs
    of_host = engine("host.weights.blocks").Loaded(model, network, torch.float16, device)
    engine("host.graphs.memory").make_room(of_host, (None, torch.zeros(2, 4, 8, 8), torch.zeros(2)))
    assert card == [(needed, device, loaded[:1]) for needed in expected]
    current = of_host._replace(device=torch.device("cpu"))
    engine("host.graphs.memory").make_room(current, (torch.zeros(2, 4, 8, 8),))
    assert len(card) == len(expected)
