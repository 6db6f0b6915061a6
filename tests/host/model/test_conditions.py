"""What wraps a model's calls or divides its inputs: caches, context windows, areas, masks, prompts, ControlNets."""

import pytest
from patch_kinds import conditions
from patching import Runs, same
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("flux", "EasyCacheNode"),
        ("sdxl", "LazyCacheNode"),
        pytest.param("wan", "EasyCacheNode", marks=pytest.mark.rest),
    ],
)
def test_caches_that_skip_steps(tiny, engine, name, cache):
    runs = Runs(tiny, engine, name, cfg=3.0, steps=6)
    assert runs.check(conditions.cached(cache)) == 0
    assert not runs.failures


def test_context_windows(tiny, engine):
    runs = Runs(tiny, engine, "wan", cfg=3.0, length=33)
    assert runs.check(conditions.windowed) == 0, "the length of a window is another size"


def test_areas(tiny, engine):
    runs = Runs(tiny, engine, "sdxl", size=128)
    assert runs.check(conditions.unpatched, positive=conditions.in_an_area(runs)) == 0, "an area is another size"
    kinds = len([kind for kind in runs.groups if kind.stats.graphs])
    assert runs.graphs == kinds > 0, [(kind.class_name, kind.stats.graphs) for kind in runs.groups]


@pytest.mark.parametrize("name", ["sdxl", pytest.param("flux", marks=pytest.mark.rest)])
def test_masks(tiny, engine, name):
    runs = Runs(tiny, engine, name)
    runs.check(conditions.unpatched, positive=conditions.in_two_masks(runs))
    runs.check(conditions.unpatched, positive=conditions.in_bounds_of_a_mask(runs))
    assert not runs.failures


@pytest.mark.parametrize("name", ["sdxl", *(pytest.param(n, marks=pytest.mark.rest) for n in ("flux", "wan", "z_image"))])
def test_prompts_of_unequal_length(tiny, engine, name):
    runs = Runs(tiny, engine, name)
    runs.check(conditions.unpatched, positive=conditions.other_prompt(runs, tokens=60))
    graphs = runs.graphs
    for tokens in (31, 80):
        positive = conditions.other_prompt(runs, tokens, seed=tokens)
        same(runs.run(runs.attach(runs.patcher), positive), runs.run(runs.patcher, positive))
    assert runs.graphs == graphs, "the graphs serve every length"
    assert not runs.failures


def test_steps_seeds_and_timestep_ranges_add_nothing(tiny, engine):
    runs = Runs(tiny, engine, "flux", cfg=3.0, steps=4)
    other = conditions.other_prompt(runs, seed=9)
    early = conditions.with_options(runs.positive, start_percent=0.0, end_percent=0.5)
    late = conditions.with_options(other, start_percent=0.5, end_percent=1.0)
    assert runs.check(conditions.unpatched, positive=early + late) <= 2


@pytest.mark.parametrize("name", ["sdxl", pytest.param("flux", marks=pytest.mark.rest)])
def test_a_controlnet_adds_between_the_blocks_and_costs_nothing(tiny, engine, name):
    runs = Runs(tiny, engine, name, cfg=3.0)
    assert runs.check(conditions.unpatched, positive=conditions.controlled(runs)) == 0
    assert runs.check(conditions.unpatched, positive=conditions.controlled_twice(runs)) == 0
