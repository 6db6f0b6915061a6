"""LoRA in every way the host applies it, merged models, object patches and hooks on modules, over and under our node."""

import pytest
from patch_kinds import conditions, weights
from patching import Runs, same
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def rest(*values):
    return [pytest.param(value, marks=pytest.mark.rest) for value in values]


def test_merged_into_the_weights(flux):
    assert flux.check(weights.lora) == 0
    assert flux.check(weights.two_loras) == 0


# The host keeps layers with a LoRA on the device before all others.
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.rest), 0.1])
def test_applied_at_each_cast_in_low_memory(flux, share):
    import comfy.model_patcher

    seen = []
    weights.load_partly(flux.patcher, share)
    flux.patcher.model.diffusion_model.register_forward_pre_hook(
        lambda network, _: seen.extend(f for layer in network.modules() for f in getattr(layer, "weight_function", ()))
    )
    added = flux.check(weights.lora)
    assert any(isinstance(f, comfy.model_patcher.LowVramPatch) for f in seen)
    assert added <= 2, flux.failures
    assert not flux.failures


def test_bypass_runs_beside_the_weights(flux):
    added = flux.check(weights.bypass_lora)
    assert added <= 8, added
    assert not flux.failures


def test_hooks_with_a_schedule(flux):
    flux.steps = 4
    assert flux.check(conditions.unpatched, positive=weights.scheduled_lora(flux)) == 0
    assert flux.check(conditions.unpatched, positive=weights.two_scheduled_loras(flux)) <= 2


def test_hooks_that_bring_patches_and_objects(flux):
    assert flux.check(conditions.unpatched, positive=weights.hooked_patch(flux)) == 4, "two pieces of each kind of block"


@pytest.mark.parametrize("ratio", [pytest.param(0.0, marks=pytest.mark.rest), 0.4])
def test_merged_models(flux, ratio):
    other = weights.other_flux()
    merged = weights.merged_with(other, ratio)
    assert flux.check(merged) == 0
    compiled = weights.merged_with(flux.attach(other), ratio)(flux.attach(flux.patcher))
    same(flux.run(compiled), flux.run(merged(flux.patcher)))


@pytest.mark.parametrize(
    "path", ["double_blocks.0", "single_blocks.2.linear1", *rest("single_blocks.2", "double_blocks.1.img_mlp")]
)
def test_object_patches_of_blocks_and_layers(flux, path):
    assert flux.check(weights.object_at(path)) <= 2


@pytest.mark.parametrize(
    "path", ["single_blocks.2", "double_blocks.1.img_mlp", *rest("single_blocks.2.linear1", "double_blocks.1")]
)
def test_object_patches_of_a_forward(flux, path):
    assert flux.check(weights.forward_at(path)) <= 4


@pytest.mark.parametrize("path", ["double_blocks.0", "single_blocks.2.norm"])
def test_object_patches_of_a_class(flux, path):
    assert flux.check(weights.class_at(path)) <= 4


def test_an_object_in_a_block_that_reads_what_blocks_do_not(tiny, engine):
    """KJNodes puts a cross-attention of its own into Wan's blocks; such code may read any entry of the options."""
    wan = Runs(tiny, engine, "wan", cfg=1.0)
    wan.check(weights.object_at("blocks.1.self_attn", weights.PlaceReader))
    wan.check(weights.place_reading_forward("blocks.2.self_attn"))

    def hook(_module, _args, kwargs, out):
        return out * (2.0 + kwargs["transformer_options"].get("block_index", -1))

    with wan.hooked("blocks.3.self_attn", hook, with_kwargs=True):
        same(wan.run(wan.attach(wan.patcher)), wan.run(wan.patcher))
    same(wan.run(wan.attach(wan.patcher)), wan.run(wan.patcher))


@pytest.mark.parametrize("path", ["double_blocks.0", "single_blocks.2.linear1"])
def test_forward_hooks(flux, path):
    flux.check_hook(path)
