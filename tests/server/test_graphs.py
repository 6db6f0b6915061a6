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


@pytest.fixture
def session_of(tmp_path, monkeypatch):
    """A function: some prompts of a model, in a server with the stand-in."""
    monkeypatch.setattr(
        "real_sessions.PROMPTS", [p for p in PROMPTS if p.name in ("first image", "next seed", "LoRA on", "again")]
    )

    def session_of(model):
        options = argparse.Namespace(host=str(host_folder()), model=model, folder=tmp_path, pack=server.ROOT, cpu=True)
        vars(options).update(settings={"backend": "eager"}, weights="default", prompt_limit=240, compile_now=False)
        session = Session(options)
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
        return session

    return session_of


def test_sessions_are_replayed_and_every_image_is_right(session_of):
    """Of a transformer and a UNet, one after the other on one server."""
    sessions = [session_of(model) for model in ("flux_small", "sdxl_small")]
    (sessions[0].base / "custom_nodes" / STAND_IN.name).symlink_to(STAND_IN)
    running = sessions[0].server()
    try:
        running.wait_until_ready()
        for session in sessions:
            running.post("/free", {"unload_models": True, "free_memory": True})
            server.wait_until(lambda: not running.get("/session/graphs")["replays"], "the model before is gone")
            session.run(running)
    finally:
        running.stop()
    assert "CUDA graphs are off" not in running.log()
    for session in sessions:
        replays = [row["replays"] for row in session.rows]
        grew = [later > before for before, later in itertools.pairwise([0, *replays])]
        # The prompt in which the compiler is there may have none: a step is traced, then code comes, and one is captured anew.
        assert grew.count(False) <= 1, replays
        assert max(max(row["errors"]) for row in session.rows) < 1e-5
