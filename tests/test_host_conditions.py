"""What wraps a model's calls or divides its inputs: caches, context windows, areas, masks, prompts, ControlNets."""

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def with_options(conditioning, **options):
    return [[text, {**found, **options}] for text, found in conditioning]


@pytest.mark.parametrize("name", ["flux", "sdxl", "wan"])
@pytest.mark.parametrize("cache", ["EasyCacheNode", "LazyCacheNode"])
def test_caches_that_skip_steps(tiny, engine, name, cache):
    import comfy_extras.nodes_easycache as easycache

    runs = Runs(tiny, engine, name, cfg=3.0, steps=6)
    node = getattr(easycache, cache)
    assert runs.check(lambda m: node.execute(m, 5.0, 0.1, 0.95, False).result[0]) == 0
    assert not runs.failures


def test_context_windows(tiny, engine):
    import comfy_extras.nodes_context_windows as windows

    runs = Runs(tiny, engine, "wan", cfg=3.0, length=33)

    def windowed(m):
        node = windows.WanContextWindowsManualNode
        return node.execute(m, 17, 8, "standard_static", 1, False, "pyramid", freenoise=False).result[0]

    assert runs.check(windowed) == 1  # the length of a window is a second shape


def test_areas(tiny, engine):
    runs = Runs(tiny, engine, "sdxl", size=128)
    other = tiny.conditioning("sdxl", seed=5)[0]
    area = with_options(other, area=(8, 8, 4, 4), strength=1.0, set_area_to_bounds=False)
    assert runs.check(lambda m: None, positive=runs.positive + area) > 0
    kinds = len([kind for kind in runs.kinds if kind.stats.graphs])
    assert runs.graphs <= 4 * kinds, [(kind.class_name, kind.stats.graphs) for kind in runs.kinds]


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_masks(tiny, engine, name):
    runs = Runs(tiny, engine, name)
    other = tiny.conditioning(name, seed=5)[0]
    mask = torch.zeros(1, 64, 64)
    mask[:, :, :32] = 1.0
    masked = with_options(other, mask=mask, mask_strength=1.0, set_area_to_bounds=False)
    rest = with_options(runs.positive, mask=1 - mask, mask_strength=0.8, set_area_to_bounds=False)
    runs.check(lambda m: None, positive=rest + masked)
    bounded = with_options(other, mask=mask, mask_strength=1.0, set_area_to_bounds=True)
    runs.check(lambda m: None, positive=runs.positive + bounded)
    assert not runs.failures


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3", "wan", "qwen_image", "z_image"])
def test_prompts_of_unequal_length(tiny, engine, name):
    runs = Runs(tiny, engine, name)
    long = tiny.conditioning(name, tokens=60, seed=3)[0]
    runs.check(lambda m: None, positive=long)
    graphs = runs.graphs
    for tokens in (31, 80):
        positive = tiny.conditioning(name, tokens=tokens, seed=tokens)[0]
        same(runs.run(runs.attach(runs.patcher), positive), runs.run(runs.patcher, positive))
    kinds = len(runs.kinds)
    assert runs.graphs - graphs <= kinds, "the dynamic graphs serve every length"
    assert not runs.failures


def test_steps_seeds_and_timestep_ranges_add_nothing(tiny, engine):
    runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
    other = tiny.conditioning("flux", seed=9)[0]
    early = with_options(runs.positive, start_percent=0.0, end_percent=0.5)
    late = with_options(other, start_percent=0.5, end_percent=1.0)
    assert runs.check(lambda m: None, positive=early + late) <= 2


def controlnet(tiny, name, seed):
    """A tiny ControlNet of the host's own classes, for SDXL and for Flux."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops

    made = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
    if name == "sdxl":
        left_out = ("out_channels", "transformer_depth_output", "use_temporal_resblock")
        config = {key: value for key, value in tiny.SDXL.items() if key not in left_out}
        model, conds = comfy.cldm.cldm.ControlNet(hint_channels=3, **config, **made), ["y"]
    else:
        config = {key: value for key, value in tiny.FLUX.items() if key != "image_model"}
        model, conds = comfy.ldm.flux.controlnet.ControlNetFlux(**config, **made), ["y", "guidance"]
    control = comfy.controlnet.ControlNet(tiny._randomise(model, seed), load_device=torch.device("cpu"), extra_conds=conds)
    return control.set_cond_hint(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed)), 0.9)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_controlnet_adds_between_the_blocks_and_costs_nothing(tiny, engine, name):
    model = Runs(tiny, engine, name, cfg=3.0)
    first, second = controlnet(tiny, name, 1), controlnet(tiny, name, 2)
    second.set_previous_controlnet(first)

    def controlled(conditioning, control):
        return [[text, {**options, "control": control, "control_apply_to_uncond": True}] for text, options in conditioning]

    for control in (first, second):
        positive = controlled(model.positive, control)
        assert model.check(lambda m: None, positive=positive) == 0
