"""Another comfy-kitchen, whose kernel of a known name does something else."""

import types

import pytest
import torch
from support import compiled_code

pytestmark = pytest.mark.host


@torch.library.custom_op("torch_compile_kit_tests::apply_rope1", mutates_args=())
def another_rope(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return -x


another_rope.register_fake(lambda x, freqs: torch.empty_like(x))


def test_a_kernel_of_another_meaning_is_run_as_it_is(everywhere, engine, monkeypatch):
    rotary = engine("inductor.rotary_norms")
    present = {name: getattr(torch.ops.comfy_kitchen, name) for name in rotary.DECOMPOSITIONS}
    another = torch.ops.torch_compile_kit_tests.apply_rope1
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "comfy_kitchen", types.SimpleNamespace(**{**present, "apply_rope1": another}))
        rotary._matching.cache_clear()
        rotary.register()
    rotary._matching.cache_clear()
    x, freqs = torch.randn(1, 2, 6, 8), torch.randn(1, 1, 6, 4, 2, 2)
    with torch.inference_mode():
        result, code = compiled_code(lambda x, freqs: another(x, freqs), everywhere.inductor, (x, freqs))
    assert torch.equal(result, -x) and "torch_compile_kit_tests" in code
