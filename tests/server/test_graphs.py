"""A session on a real server, its calls captured and replayed as on a GPU: no code around them counts as another pack's."""

import argparse
import itertools
from pathlib import Path

import pytest
from real_sessions import PROMPTS, Session

from devtools import server
from devtools.inprocess import host_folder

pytestmark = [pytest.mark.server, pytest.mark.rest]

STAND_IN = Path(__file__).with_name("stand_in_for_graphs.py")


@pytest.mark.parametrize("model", ["flux_small", "sdxl_small"])
def test_a_session_is_replayed_and_every_image_is_right(tmp_path, model, monkeypatch):
    options = argparse.Namespace(host=str(host_folder()), model=model, folder=tmp_path, pack=server.ROOT, cpu=True)
    vars(options).update(settings={"backend": "eager"}, weights="default", prompt_limit=240, compile_now=False)
    monkeypatch.setattr(
        "real_sessions.PROMPTS", [p for p in PROMPTS if p.name in ("first image", "next seed", "LoRA on", "again")]
    )
    session = Session(options)
    (session.base / "custom_nodes" / STAND_IN.name).symlink_to(STAND_IN)
    session.more_packs = [STAND_IN.name]
    graph = session.graph

    def with_stand_in(number, prompt, compiled):
        nodes = graph(number, prompt, compiled)
        if compiled:
            nodes["stand-in"] = {"class_type": "StandIn", "inputs": {"model": nodes["compile"]["inputs"]["model"]}}
            nodes["compile"]["inputs"]["model"] = ["stand-in", 0]
        return nodes

    session.graph = with_stand_in
    session.write_weights()
    running = session.server()
    try:
        running.wait_until_ready()
        session.run(running)
    finally:
        running.stop()
    replays = [row["replays"] for row in session.rows]
    assert "CUDA graphs are off" not in running.log()
    grew = [later > before for before, later in itertools.pairwise([0, *replays])]
    # The prompt in which the compiler is there may have none: one step is traced, then code comes, and one is captured anew.
    assert grew.count(False) <= 1, replays
    assert max(max(row["errors"]) for row in session.rows) < 1e-5
