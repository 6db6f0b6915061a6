"""The host's architectures, tiny: compiled block by block, equal to eager, with as many graphs as promised.

The wide sweep only traces; a sample goes through inductor. `tests/sweep.py` runs all set-ups of the zoo and writes the table.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import sweep
import zoo

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# Variants of one class that exercise the code of another set-up; the script sweeps them too.
NEAR_DUPLICATES = set(
    """
    sd15_inpaint sd15_ip2p sd20 sd21_unclip lotus sdxl_ip2p sdxl_refiner ssd1b koala sv3d_u sv3d_p sd_x4 cascade_b
    flux_schnell flux_uxo flux_mask flux_fill flux_control flux2_edit flux2_klein chroma_radiance_linear
    hunyuan_video_mask hunyuan_custom skyreels_i2v hunyuan_video_15_i2v hunyuan_video_15_sr hunyuan_image21_distilled
    hunyuan_image21_refiner wan21_bernini wan21_flf2v wan21_fun_control wan21_flow_rvs wan22_i2v wan22_5b_i2v
    wan22_camera wan_humo_17b wan_causal_cached wan_scail2 sd35_medium pixart_alpha hunyuan_dit1 qwen_image_mask
    qwen_image_edit_2511 qwen_image_layered mageflow_edit newbie z_image_pixel omnigen2_edit boogu_edit hidream_e1
    hidream_o1_edit krea2_edit ideogram4_mask joyimage_edit pid pid15 ltxv_i2v ltxav_connectors ltxav_23 cosmos1_i2v
    cosmos_predict2_i2v cogvideox_5b cogvideox_i2v cogvideox15_i2v cogvideox_inpaint kandinsky5_i2v kandinsky5_image
    minimax_h3_keyframe ace_step15_codes ace_step15_timbre stable_audio3 hunyuan3d_v2_turbo
    """.split()  # noqa: SIM905
)
SWEPT = [name for name in zoo.SETUPS if name not in NEAR_DUPLICATES]
# Code that PyTorch cannot trace whole: a count per expert that decides shapes, sizes taken from tensors by tolist().
HARD = {"hunyuan3d_v21", "seedvr2"}


def test_the_sweep_is_wide():
    assert len(SWEPT) >= 60 and set(SWEPT) <= set(zoo.SETUPS) and set(zoo.SETUPS) >= NEAR_DUPLICATES


@pytest.fixture(scope="module")
def outcomes():
    """All outcomes; written to the file that COMPATIBILITY_JSON names, for the table."""
    found = []
    yield found
    if os.environ.get("COMPATIBILITY_JSON"):
        Path(os.environ["COMPATIBILITY_JSON"]).write_text(json.dumps([asdict(o) for o in found], indent=1) + "\n")


@pytest.mark.parametrize("name", SWEPT)
def test_traced(name, engine, outcomes):
    outcome = sweep.run_setup(engine, zoo.SETUPS[name])
    outcomes.append(outcome)
    row = f"{sweep.as_row(outcome)}\n{outcome.recompiles}"
    assert outcome.error < 1e-5, row
    assert outcome.blocks >= 2 and not outcome.whole_model, row
    if name in HARD:
        assert name != "seedvr2" or "NaMMSRTransformerBlock" in outcome.eager, row  # runs eager, and is named
        return
    assert outcome.graphs <= outcome.kinds, row
    assert outcome.graphs_after <= 2 * outcome.kinds, row
    assert outcome.graphs_again == 0 and outcome.breaks == 0 and not outcome.eager, row


@pytest.mark.parametrize("name", ["lumina2", "hidream_i1", "cosmos_predict2"])
def test_inductor(name, engine):
    outcome = sweep.run_setup(engine, zoo.SETUPS[name], backend="inductor", dynamic="true")
    assert outcome.error < 1e-4 and outcome.graphs > 0 and not outcome.eager, sweep.as_row(outcome)


class TestDynamicSettings:
    """`true` and `false` mean what they say, on an architecture of the host."""

    def test_true_takes_one_graph_for_batch_one_and_one_for_all_others(self, engine):
        outcome = sweep.run_setup(engine, zoo.SETUPS["qwen_image"], dynamic="true")
        assert (outcome.kinds, outcome.graphs, outcome.graphs_after, outcome.graphs_again) == (1, 1, 1, 0)

    def test_false_takes_one_for_each_shape(self, engine):
        outcome = sweep.run_setup(engine, zoo.SETUPS["qwen_image"], dynamic="false")
        shapes = len(sweep.runs_of(zoo.SETUPS["qwen_image"]))
        assert (outcome.graphs, outcome.graphs_after, outcome.graphs_again) == (1, shapes, 0)
