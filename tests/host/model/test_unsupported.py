"""A PyTorch that lacks what compiling needs: the nodes load, models pass through, and the node's line says why."""

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def lacking(engine, monkeypatch):
    private = engine("torch_compat.private")
    renamed = private.PrivateName("torch._guards:renamed_by_a_newer_version")
    monkeypatch.setitem(private.NAMES, "tracing", renamed)
    private.unsupported.cache_clear()
    yield "torch._guards.renamed_by_a_newer_version"
    private.unsupported.cache_clear()


def test_a_model_passes_through_and_its_line_says_why(tiny, engine, lacking):
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    attached = engine("host.model.attach").attach(runs.patcher, engine("settings").CompileSettings(), "7")
    same(runs.run(attached), runs.plain(), "with the node")
    assert not runs.graphs
    line = engine("notices.status").lines_of()["7"]
    assert line.state == "unclear" and line.says == [["pytorchLacks", torch.__version__, lacking, "2.9", "2.15"]]
    assert lacking in engine("failures.machine").preflight_here(False)[1][0]
    assert "Nothing to warm up" in engine("host.nodes.warmup").warm_up(attached, runs.positive, runs.negative, 1.0, [])
