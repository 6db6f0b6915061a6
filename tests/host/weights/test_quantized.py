"""Quantised models: no graph breaks, and the host's results, emulated and with native matrix products (on the CPU: the
host's own fallback behind the same code)."""

import itertools

import pytest
from patch_kinds.weights import quantised
from patching import Runs
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


FORMATS = "float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4"
# Each format once; int8 is computed in the same way either way.
FIRST = {("float8_e4m3fn", True), ("int8_tensorwise", False), ("mxfp8", False), ("nvfp4", True)}


@pytest.mark.parametrize(
    ("format_name", "native"),
    [
        pair if pair in FIRST else pytest.param(*pair, marks=pytest.mark.rest)
        for pair in itertools.product(FORMATS, (False, True))
    ],
)
def test_no_breaks_and_the_hosts_result(format_name, native, tiny, engine, monkeypatch):
    import comfy.model_management
    import comfy.ops
    import comfy.sd

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    with monkeypatch.context() as patch:
        for name in ("supports_fp8_compute", "supports_nvfp4_compute", "supports_mxfp8_compute"):
            patch.setattr(comfy.model_management, name, lambda *_: native)
        state_dict = quantised(runs.patcher.model.diffusion_model.state_dict(), format_name)
        runs.patcher = comfy.sd.load_diffusion_model_state_dict(state_dict)
    layer = runs.patcher.model.diffusion_model.single_blocks[0].linear1
    assert type(layer.weight).__name__ == "QuantizedTensor"
    before = comfy.ops.cast_bias_weight
    try:
        expected = runs.run(runs.patcher)
    except ValueError as error:
        if native and "CPU does not support swizzle" in str(error):
            pytest.skip("PyTorch 2.15 has no native mxfp8 and nvfp4 products on a CPU: ComfyUI itself cannot run them there")
        raise
    assert relative_error(runs.run(runs.attach(runs.patcher, fullgraph=True)), expected) < 1e-3
    assert runs.graphs == 2 and not runs.failures
    assert sum(group.stats.graph_breaks for group in runs.groups) == 0
    assert comfy.ops.cast_bias_weight is before
