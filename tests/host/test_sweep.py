"""The host's architectures, tiny: compiled block by block, equal to eager, with as many graphs as promised.

The wide sweep only traces; a sample goes through inductor. `tests/sweep.py` runs all set-ups of the zoo and writes the table.
"""

import pytest
import sweep
import torch
import zoo

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# One for each way through the code; the others are marked `rest`.
FIRST = {
    "sd15",  # parts of blocks in place of the blocks
    "wan21_t2v",  # one class in two forms of call
    "hunyuan_video",  # three classes, a mask
    "ltxv",  # a length of text that is settled by the model
    "hidream_o1",  # state on the network, a class that no call uses
    "minimax_h3",  # inputs in containers
    "stable_audio",  # one dimension
}
SWEPT = [name for name in zoo.SETUPS if name not in sweep.NEAR_DUPLICATES]
# Tiny ones of these are in model/test_models.py, and with prompts of any length in nodes/test_warmup.py.
ELSEWHERE = {"flux", "sdxl", "sd3", "qwen_image", "z_image"}
# Code that PyTorch cannot trace whole, and what of it runs eager: a count per expert that decides shapes, sizes taken from
# tensors by tolist(), and, on a CPU alone, attention that reads the free memory. Trellis' sparse blocks are compiled in pieces:
# sizes taken from voxels. PixelDiT's loop over chunks of pixels, a graph for each size; Z-Image Omni's sort slices of tokens.
HARD = {
    **{"hunyuan3d_v21": set(), "seedvr2": {"NaMMSRTransformerBlock"}, "minimax_music3": set(), "trellis2_shape": set()},
    **{"pixeldit": set(), "z_image_omni": set()},
}
# Of these, those that are traced anew for each size: for half a minute each.
BRIEF = {"seedvr2", "pixeldit", "z_image_omni"}
# Blocks whose graphs cannot go to another process, and why.
# SeedVR2's, traced for each window size, are taken to read numbers that differ.
INLINE = {"seedvr2": {"NaMMSRTransformerBlock": "a number in it varies"}}
# The model calls its blocks by other methods than `forward`, so that nothing of them is compiled.
OTHER_METHODS = {"wan_animate2"}
# What the pinned hosts lack.
LACKING = {
    "0.30.0": ["ltxav_25", "minimax_music3", "trellis2_shape", "trellis2_structure", "wan_animate2"],
    "0.33.0": [],
}
# Models of the host that are no denoisers: detection, segmentation, depth.
NO_DENOISERS = {"RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"}


@pytest.fixture(scope="module")
def in_background():
    """By set-up, what came of it in the background."""
    return {}


def test_the_sweep_is_wide():
    assert set(zoo.ALL) >= sweep.NEAR_DUPLICATES and len(zoo.ALL) == 145
    assert len(set(zoo.ALL) - sweep.NEAR_DUPLICATES) == 61 and set(SWEPT) | set(zoo.LACKING) >= FIRST


def test_a_host_lacks_only_what_is_known_to_be_newer():
    """A newer host lacks nothing."""
    assert LACKING.get(sweep.host_version(), []) == zoo.LACKING
    assert len(SWEPT) + len(zoo.LACKING) == len(set(zoo.ALL) - sweep.NEAR_DUPLICATES)


def test_every_model_of_the_host_has_a_set_up():
    import comfy.supported_models

    models = {model.__name__ for model in comfy.supported_models.models} - NO_DENOISERS
    assert models - {setup.config for setup in zoo.ALL.values()} == set()


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.rest) for name in SWEPT if name not in ELSEWHERE]
)
def test_traced(name, engine, in_background):
    in_background[name] = sweep.run_setup(engine, zoo.SETUPS[name], brief=name in BRIEF)
    check(name, in_background[name])


@pytest.mark.rest
@pytest.mark.parametrize("name", ["flux", "hidream_o1", "minimax_h3", "sd15"])
def test_traced_at_once(name, engine, in_background):
    """As many graphs as in the background."""
    if name not in in_background:
        test_traced(name, engine, in_background)
        for kept in (engine("compile.registry")._groups, engine("compile.registry")._recent):  # else they would be used
            kept.clear()
        torch._dynamo.reset()
    at_once = sweep.run_setup(engine, zoo.SETUPS[name], compile_when="before first image")
    check(name, at_once)
    counts = [(o.graphs, o.graphs_after, o.graphs_again, o.breaks) for o in (at_once, in_background[name])]
    assert counts[0] == counts[1]


def check(name, outcome):
    row = f"{sweep.as_row(outcome)}\n{outcome.recompiles}"
    assert outcome.inline == INLINE.get(name, {}), row
    assert outcome.error < 1e-5, row
    assert outcome.blocks >= 2 and not outcome.whole_model, row
    if name in OTHER_METHODS:
        assert outcome.graphs == outcome.graphs_after == 0 and outcome.idle == ["WanAnimate2Block"], row
        assert outcome.uncalled == {"WanAnimate2Block": 3}, row
        return
    assert not outcome.uncalled, row
    assert outcome.graphs > 0 and outcome.graphs_again == 0, row
    assert set(outcome.eager) == HARD.get(name, set()), row
    in_one_piece = outcome.graphs <= outcome.groups and outcome.graphs_after <= outcome.groups and outcome.breaks == 0
    assert in_one_piece == (name not in HARD), row


@pytest.mark.skipif(bool(OTHER_METHODS.intersection(zoo.LACKING)), reason="Wan Animate 2 came with ComfyUI 0.31")
@pytest.mark.parametrize("compile", ["before first image", "in background"])
def test_the_report_says_that_blocks_are_called_by_other_methods(compile, engine, caplog):
    setup, attachment = zoo.SETUPS["wan_animate2"], engine("host.model.attach")
    patcher = attachment.attach(setup.patcher(), engine("settings").CompileSettings(backend="eager", compile_when=compile))
    said = "The model does not call its blocks (3 WanAnimate2Block) as modules but by other methods: they run uncompiled."
    assert said not in attachment.notes_about(patcher)
    compiler = patcher.get_wrappers("apply_model", attachment.KEY)[0]
    expected = sweep.call(patcher.model, setup.inputs(model=patcher.model))
    for _ in range(2):
        assert torch.equal(sweep.call(patcher.model, setup.inputs(model=patcher.model), compiler), expected)
    assert attachment.notes_about(patcher).count(said) == 1
    assert [record.getMessage() for record in caplog.records].count(said) == 1
    assert not engine("compile.registry").code_of(patcher.model.diffusion_model).is_being_compiled


@pytest.mark.rest
def test_inductor(engine):
    outcome = sweep.run_setup(engine, zoo.SETUPS["ernie"], backend="inductor", brief=True, dynamic="true")
    assert outcome.error < 1e-4 and outcome.graphs > 0 and not outcome.eager, sweep.as_row(outcome)


class TestDynamicSettings:
    """`true` and `false` mean what they say, on an architecture of the host."""

    def test_true_takes_one_graph_for_batch_one_and_one_for_all_others(self, engine):
        outcome = sweep.run_setup(engine, zoo.SETUPS["qwen_image"], dynamic="true")
        assert (outcome.groups, outcome.graphs, outcome.graphs_after, outcome.graphs_again) == (1, 1, 1, 0)

    @pytest.mark.rest
    def test_false_takes_one_for_each_shape(self, engine):
        outcome = sweep.run_setup(engine, zoo.SETUPS["qwen_image"], dynamic="false")
        shapes = len(sweep.runs_of(zoo.SETUPS["qwen_image"]))
        assert (outcome.graphs, outcome.graphs_after, outcome.graphs_again) == (1, shapes, 0)
