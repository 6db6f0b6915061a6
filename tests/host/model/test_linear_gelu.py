"""GELU inside the matrix product before it, in the host's transformers."""

import pytest
import torch
from patching import Runs
from support import compile_settings

pytestmark = pytest.mark.host


@pytest.mark.parametrize(("name", "least"), [("flux", 2), ("qwen_image", 2), ("wan", 1)])
def test_the_hosts_transformers_have_it(name, least, tiny, engine, monkeypatch):
    epilogues, found = engine("inductor.linear_gelu"), []
    monkeypatch.setattr(epilogues, "_DTYPES", (torch.float32,))

    def backend(graph, _inputs):
        epilogues.gelu_in_linear(graph.graph)
        found.append(str(graph.graph).count("_addmm_activation"))
        return graph

    runs = Runs(tiny, engine, name, cfg=1.0, steps=1)
    settings = compile_settings(engine, backend=backend, compile="at once")
    with torch.inference_mode():
        runs.run(engine("host.model.attach").attach(runs.patcher, settings))
    assert max(found) >= least, found
