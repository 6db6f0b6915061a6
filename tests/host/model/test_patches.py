"""Patches of the host that act inside a model: compiled equals eager with each, without it, and with it added again."""

import functools

import pytest
from patch_kinds import options
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def runs(tiny, engine):
    return lambda name, **chosen: Runs(tiny, engine, name, **chosen)


@pytest.mark.parametrize(
    "how, patch",
    [
        ("attn1_patch", options.scaled_inputs),
        ("attn2_patch", options.scaled_inputs),
        ("attn1_output_patch", options.scaled_output),
        ("attn2_output_patch", options.by_heads),
        ("attn1_output_patch", options.by_sigma),
        ("attn2_output_patch", options.closure_over(1.7)),
    ],
)
def test_a_patch_of_a_unets_attention_costs_one_graph_per_kind(runs, how, patch):
    unet = runs("sdxl")
    assert unet.check(options.patched_with(patch, how)) == 2
    assert not unet.failures


def test_a_patch_between_the_attentions(runs):
    unet = runs("sdxl")
    assert unet.check(options.patched_with(options.scaled_output, "middle_patch")) == 2


@pytest.mark.parametrize(
    "patch",
    [
        options.by_place,
        pytest.param(options.by_everything, marks=pytest.mark.rest),
        pytest.param(functools.partial(options.scaled_by, factor=1.6), marks=pytest.mark.rest),
    ],
)
def test_a_patch_that_reads_its_place_or_cannot_be_analysed_sees_it(runs, patch):
    unet = runs("sdxl")
    unet.check(options.patched_with(patch, "attn1_output_patch"))
    if unet.failures:
        assert "attn1_output_patch" in unet.failures[0] and "runs eager" in unet.failures[0]


@pytest.mark.parametrize("attn", ["attn1", "attn2"])
def test_objects_that_replace_attention_share_a_graph(runs, attn):
    unet = runs("sdxl")
    assert unet.check(options.image_prompts(attn)) == 2
    assert not unet.failures


def test_a_replacement_in_one_layer_of_one_block(runs):
    unet = runs("sdxl")
    unet.check(options.one_image_prompt)
    assert not unet.failures


def test_a_patch_that_differs_every_time_runs_eager_and_is_named(runs, engine):
    unet = runs("sdxl", steps=4)
    unet.check(options.image_prompts("attn2", options.Counting))
    assert unet.failures and all("attn2" in f and "Counting" in f and "runs eager" in f for f in unet.failures)
    report = engine("notices.report")
    assert "Counting" in str(report.report_json())
    graphs = unet.graphs
    unet.check(options.patched_with(options.scaled_output, "attn1_output_patch"))
    assert unet.graphs == graphs + 2, "other patches are compiled as ever"


def test_a_patch_that_cannot_be_compiled_runs_eager_and_is_named(runs):
    flux = runs("flux", cfg=1.0)

    def add(m):
        m.set_model_attn1_output_patch(options.untraceable)

    expected = flux.run(_patched(flux.patcher, add))
    compiled = flux.attach(flux.patcher, fullgraph=True)
    plain = flux.run(compiled)
    same(flux.run(_patched(compiled, add)), expected)
    assert flux.failures and all("untraceable" in f for f in flux.failures)
    graphs = flux.graphs
    same(flux.run(compiled), plain)
    assert flux.graphs == graphs == 2


def _patched(patcher, how):
    clone = patcher.clone()
    how(clone)
    return clone


@pytest.mark.parametrize(
    "name, how, patch, kinds",
    [
        ("flux", "attn1_patch", options.flux_inputs, 2),
        ("flux", "attn1_output_patch", options.scaled_output, 2),
        ("qwen_image", "attn1_patch", options.flux_inputs, 1),
        ("wan", "attn1_patch", options.wan_output, 1),
        ("wan", "attn2_patch", options.wan_output, 1),
    ],
)
def test_a_patch_inside_the_blocks_of_a_transformer(runs, name, how, patch, kinds):
    dit = runs(name, cfg=1.0)
    assert dit.check(options.patched_with(patch, how)) == kinds


@pytest.mark.parametrize(
    "name, kind",
    [
        ("flux", "double_block"),
        pytest.param("flux", "single_block", marks=pytest.mark.rest),
        pytest.param("wan", "double_block", marks=pytest.mark.rest),
    ],
)
def test_a_replacement_around_a_block_costs_nothing(runs, name, kind):
    dit = runs(name, cfg=1.0)
    assert dit.check(options.block_replaced(options.around, kind, 1)) == 0
    assert dit.check(options.block_replaced(options.skip, kind, 0)) == 0


def test_patches_between_the_blocks_cost_nothing(runs):
    unet, flux = runs("sdxl"), runs("flux", cfg=1.0)
    assert unet.check(options.output_block) == 0
    assert unet.check(options.input_block) == 0
    assert flux.check(options.post_input) == 0


@pytest.mark.parametrize("override, most", [(options.passed_on, 2), (options.by_place_of_attention, 10)])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_an_attention_override(runs, name, override, most):
    model = runs(name, cfg=1.0)
    assert 1 <= model.check(options.overridden(override)) <= most


def test_a_hypernetwork(runs):
    unet = runs("sdxl")
    assert unet.check(options.hypernetwork()) == 2
    assert not unet.failures
