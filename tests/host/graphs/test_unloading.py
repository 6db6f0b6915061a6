"""CUDA graphs of a model that the host unloads."""

import gc

import comfy.model_management
import comfy.model_patcher
import pytest
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
