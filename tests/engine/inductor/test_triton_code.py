"""The Triton code that inductor writes with our choices. Writing it needs no GPU; its kernels are not compiled or run here."""

import sys
import types

import pytest
import torch
from torch.nn import functional


@pytest.fixture
def kernels(engine, monkeypatch):
    """kernels(function, *tensors): the sources of what inductor makes of it, by name, as for a CUDA device."""
    import torch._inductor.codegen.triton as codegen
    import torch.utils._triton
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    inductor, found = engine("inductor.backend"), {}

    def compile_kernel(_self, name, source, *_args, **_kwargs):
        found[name] = source
        return types.SimpleNamespace(run=lambda *_args, **_kwargs: None)

    monkeypatch.setattr(inductor, "is_nvidia", lambda _device: True)
    monkeypatch.setattr(engine("inductor.persistent_reductions"), "is_nvidia", lambda _device: True)
    monkeypatch.setattr(AsyncCompile, "triton", compile_kernel)
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda *_: "none")
    for module in (codegen, sys.modules["torch._inductor.scheduler"]):
        for name in ("has_triton", "has_triton_package"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_args, **_kwargs: True)

    def write(function, *tensors):
        found.clear()
        torch._dynamo.reset()
        with torch.inference_mode(), fresh_cache(), config.patch(cpu_backend="triton", compile_threads=1):
            torch.compile(function, backend=inductor.inductor, fullgraph=True)(*tensors)
        torch._dynamo.reset()
        return dict(found)

    return write


def only(found, word):
    (source,) = (source for name, source in found.items() if word in name)
    return source


def test_a_tokens_channels_in_one_pass(kernels):
    source = only(
        kernels(lambda x, s: functional.layer_norm(x, (3072,)) * s, torch.ones(8, 3072), torch.ones(3072)), "layer_norm"
    )
    assert "persistent_reduction(" in source and "ReductionHint.INNER" in source


def test_tiles_without_a_reduction(kernels):
    """HunyuanVideo: what is added lies the other way round."""
    found = kernels(lambda x, update: x + update * 2, torch.ones(1, 384, 2048).transpose(1, 2), torch.ones(1, 2048, 384))
    assert "'y'" in only(found, "_fused_")
