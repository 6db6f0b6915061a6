"""Block Swap: how much of a model the host loads, and that it computes the same."""

import copy
import gc

import pytest
import torch
from patching import Runs, same
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def runs(tiny, engine):
    found = Runs(tiny, engine, "flux")
    if found.patcher.is_dynamic():
        pytest.fail("the tiny models are loaded without dynamic VRAM")
    return found


@pytest.fixture
def swap(engine):
    return engine("host.weights.swap").swap_blocks


def of_blocks(runs, count):
    import comfy.model_management

    network = runs.patcher.model.diffusion_model
    blocks = [*network.double_blocks, *network.single_blocks]
    return sum(map(comfy.model_management.module_size, blocks)) * count // len(blocks)


def loaded_by(patcher):
    """What the host's loading leaves on the device, and what is cast on the way."""
    patcher.partially_load(patcher.load_device, 1e32)
    layers = [m for m in patcher.model.modules() if getattr(m, "comfy_cast_weights", False)]
    return patcher.model.model_loaded_weight_memory, layers


@pytest.mark.parametrize("compiled", ["before", "behind", None])
def test_as_much_is_left_out_as_was_asked_for(runs, swap, compiled):
    patcher = runs.attach(runs.patcher) if compiled == "before" else runs.patcher
    found = swap(patcher, 2)
    assert found.size == of_blocks(runs, 2) and found.patcher is not patcher
    swapped = runs.attach(found.patcher) if compiled == "behind" else found.patcher
    loaded, layers = loaded_by(swapped)
    assert loaded <= runs.patcher.model_size() - found.size and layers
    again, _ = loaded_by(swapped.clone())
    assert again == loaded, "clones keep to it"
    copied = copy.copy(swapped.clone())
    gc.collect()
    assert loaded_by(copied)[0] == loaded, "copies whose original is gone keep to it"
    whole, layers = loaded_by(runs.patcher)
    assert whole > loaded, "what is connected to the first one loads as ever"
    swapped.detach()


def test_a_patcher_whose_load_takes_names_alone(runs, swap):
    import comfy.model_patcher

    class Patcher(comfy.model_patcher.ModelPatcher):
        """As that of ComfyUI-GGUF."""

        def load(self, *args, force_patch_weights=False, **kwargs):
            super().load(*args, force_patch_weights=True, **kwargs)

    patcher = runs.patcher.clone()
    patcher.__class__ = Patcher
    found = swap(patcher, 2)
    loaded, layers = loaded_by(found.patcher)
    assert loaded <= runs.patcher.model_size() - found.size and layers
    found.patcher.detach()


def test_a_model_that_was_loaded_whole_is_unloaded_to_it(runs, swap):
    expected = runs.run(runs.patcher)
    assert runs.patcher.model.model_loaded_weight_memory == runs.patcher.model_size()
    found = swap(runs.attach(runs.patcher), 2)
    same(runs.run(found.patcher), expected)
    assert runs.patcher.model.model_loaded_weight_memory <= runs.patcher.model_size() - found.size
    assert not runs.failures
    same(runs.run(runs.patcher), expected, "without the node again")


def test_nothing_to_swap_and_more_than_there_is(runs, swap, engine):
    nothing = swap(swap(runs.patcher, 3).patcher, 0)
    assert nothing.size == 0 and loaded_by(nothing.patcher.clone())[0] == runs.patcher.model_size()
    nothing.patcher.detach()
    refused = engine("errors").InvalidSetting
    most = swap(runs.patcher, 500)
    assert (most.swapped, most.blocks, most.size) == (6, 6, of_blocks(runs, 6))
    with pytest.raises(refused, match="blocks_to_swap"):
        swap(runs.patcher, -1)
    with pytest.raises(refused, match="model"):
        swap(object(), 1)


@pytest.mark.parametrize("asked, said", [(2, "2 of 6 blocks"), (10, "6 of 6 blocks")])
def test_the_node_says_how_much_stays_in_ram(runs, pack_module, asked, said):
    """A model with fewer blocks than were asked for runs all the same."""
    output = pack_module("nodes.block_swap").BlockSwap.execute(runs.patcher, asked)
    (text,) = output.ui["text"]
    assert said in text and ("10 were asked for" in text) == (asked == 10), text
    assert runs.run(output.result[0]).isfinite().all()


def test_dynamic_vram_is_left_alone(runs, swap, monkeypatch):
    monkeypatch.setattr(type(runs.patcher), "is_dynamic", lambda _self: True)
    assert swap(runs.patcher, 2) == (runs.patcher, 6, 2, None)


def test_a_lora_stays_right(runs, swap):
    """Patched on the way to the layers that are left out."""
    key = "diffusion_model.single_blocks.0.linear1.weight"
    weight = runs.patcher.model.get_parameter(key)
    patched = runs.patcher.clone()
    patched.add_patches({key: (torch.randn_like(weight) * 0.2,)})
    expected = runs.run(patched)
    assert not torch.allclose(expected, runs.run(runs.patcher))
    same(runs.run(swap(runs.attach(patched), 3).patcher), expected)
