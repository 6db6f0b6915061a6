"""Weights under dynamic VRAM in another dtype than the model computes in: layers cast these weights, as the host's do."""

import comfy.model_management
import pytest
import torch
from paging import paged
from patching import Runs
from support import relative_error, wait_until_compiled
from torch import nn
from torch.nn import functional

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def in_bf16(tiny, engine, name):
    """A model whose classes cast no weights, as the host builds a model in the dtype in which it computes."""
    runs = Runs(tiny, engine, name, cfg=1.0)
    network = runs.patcher.model.diffusion_model
    network.to(torch.bfloat16).dtype = torch.bfloat16
    comfy.model_management.archive_model_dtypes(network)
    return runs, network


@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_small_weights_in_the_dtype_of_the_file(tiny, engine, monkeypatch, when):
    """The host loads layers of at most 16 KiB as in the file, such as a UNet's norms, whose CUDA kernels refuse the mix."""
    runs, network = in_bf16(tiny, engine, "sdxl")
    seen = set()

    def note(norm):
        def noted(x, shape, weight=None, *more, **named):
            if weight is not None:
                seen.add((x.dtype, weight.dtype))
            return norm(x, shape, weight, *more, **named)

        return torch.compiler.allow_in_graph(noted)

    for module in network.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.float()
    with paged(monkeypatch, runs.patcher.model) as pages:
        pages.resident = set(pages.layers)
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher, compile_when=when)
        for name in ("layer_norm", "group_norm"):
            monkeypatch.setattr(functional, name, note(getattr(functional, name)))
        for _ in range(2):
            assert relative_error(runs.run(compiled), expected) < 1e-2
            wait_until_compiled(engine)
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert sum(group.stats.graph_breaks for group in runs.groups) == 0
    assert runs.graphs and not runs.failures


@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_a_compute_dtype_that_a_node_has_chosen(tiny, engine, monkeypatch, when):
    """As ModelComputeDtype (comfy_extras/nodes_model_advanced.py) does; under dynamic VRAM the host forces no cast."""
    runs, _network = in_bf16(tiny, engine, "flux")
    patcher = runs.patcher.clone()
    patcher.add_object_patch("manual_cast_dtype", torch.float32)
    with paged(monkeypatch, patcher.model) as pages:
        pages.resident = set(pages.layers)
        expected = runs.run(patcher)
        compiled = runs.attach(patcher, compile_when=when)
        for _ in range(2):
            assert relative_error(runs.run(compiled), expected) < 1e-5
            wait_until_compiled(engine)
    assert runs.graphs and not runs.failures
