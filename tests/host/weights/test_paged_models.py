"""The host's architectures under dynamic VRAM with no room: each block computes with the weights that are its own."""

import pytest
import sweep
import torch
import zoo
from paging import Buffers, own_streams, paged

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# One of each way in which a model runs layers between its blocks, or blocks in another order than they are written down in, and
# three that people use; once all of SWEPT passed.
FIRST = ["flux2", "wan_vace", "omnigen2"]
OTHERS = ["sdxl", "wan_s2v", "z_image"]


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(name, marks=pytest.mark.rest) for name in OTHERS)])
def test_weights_that_come_through_shared_buffers(name, engine, monkeypatch):
    """Layers outside the blocks are fetched through the same two buffers, by the host, wherever a model runs them."""
    own_streams(engine, monkeypatch)
    setup = zoo.SETUPS[name]
    model = setup.build()
    setup.patcher(model)  # leaves what the host keeps on a model
    network, buffers = model.diffusion_model, Buffers(2**26)
    plan = engine("compile.binding").plan_for(network)
    inside = {layer for block in engine("compile.binding").modules_at(network, plan) for layer in block.modules()}
    wrapper = engine("host.model.wrapper")
    compiler = wrapper.BlockCompiler(
        model, engine("settings").CompileSettings(backend="eager", compile_when="before first image")
    )
    first = {"size": 0, "batch": setup.max_batch or 2}

    def run(*compiler):
        sweep.clear_state(network)
        return sweep.call(model, setup.inputs(model=model, **first), *compiler)

    def host_fetches(*_):  # on a CPU it does not
        buffers.of(buffers.stream()).get(2**26, 0).fill_(255)

    expected = run()
    with torch.backends.mkldnn.flags(enabled=False), paged(monkeypatch, model, buffers, minimum=1024) as pages:
        hooks = [m.register_forward_pre_hook(host_fetches) for m in network.modules() if hasattr(m, "_v") and m not in inside]
        try:
            for _ in range(2):
                difference = (run(compiler) - expected).abs().max() / expected.abs().max()
                assert difference < 1e-4
        finally:
            for hook in hooks:
                hook.remove()
        assert pages.faults
