"""The frames of a model's call lie in one piece of memory."""

import sys

import pytest
from frames import CALLS, most_pages
from patching import Runs

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info < (3, 11), reason="another Python keeps frames elsewhere")
def test_no_call_of_a_layer_maps_memory_for_its_frame(tiny, engine, monkeypatch):
    runs, pages = Runs(tiny, engine, "flux", cfg=1.0, steps=1, only="single_blocks.*"), []
    network = runs.patcher.model.diffusion_model
    entry = network.img_in.forward
    monkeypatch.setattr(network.img_in, "forward", lambda x: pages.append(most_pages()) or entry(x))
    runs.run(runs.patcher)
    runs.run(runs.attach(runs.patcher))
    plain, compiled = pages
    assert plain >= CALLS and compiled < CALLS / 10
