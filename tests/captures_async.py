"""Capture and replay CUDA graphs from memory of cudaMallocAsync: inductor's kernels and ours, two sizes, calls that fail, calls
that keep what they compute, graphs that are dropped.

    PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync python tests/captures_async.py

A process of its own, which a failed capture can end (CUDAMallocAsyncAllocator.cpp, `free_impl`). Versions of PyTorch with which
it gets to its end go into `CAPTURES_ASYNC` of engine/torch_compat/private.py.
"""

import gc
import os
import sys
import weakref
from pathlib import Path

import torch


def main():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from engine.channels_last import kernels
    from engine.cuda_graphs.capture import ModelGraphs

    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        raise RuntimeError("this process has another allocator: it would prove nothing")
    device = torch.device("cuda", 0)
    compiled = torch.compile(lambda x, scale: torch.nn.functional.silu(x * scale) + x.mean(1, keepdim=True), dynamic=True)
    weight = torch.linspace(0.5, 1.5, 64, device=device, dtype=torch.half)

    def made(fails, kept):
        def model(x, scale):
            y = compiled(x, scale).contiguous(memory_format=torch.channels_last)
            out = torch.empty_like(y)
            kernels.apply_factors(y, kernels.factors_of(y, 8, weight, weight, 1e-5), out, True)
            if fails == "raises" and torch.cuda.is_current_stream_capturing():
                raise ValueError("in the middle of a capture", model)
            if fails == "keeps":
                kept.append(y)
            if fails == "garbage":
                cycle = [y]
                cycle.append(cycle)
            if fails == "waits":
                out = out + out[out > 0].sum(dtype=torch.float) * 0  # in half it overflows, and infinity times 0 is NaN
            return compiled(out, scale) + x

        return model

    def check(graphs, model, size, step, **options):
        x = torch.randn(2, 64, size, size, generator=torch.Generator().manual_seed(step)).to(device, torch.half)
        scale = torch.full((1,), 1.0 + step, device=device, dtype=torch.half)
        result, expected = graphs.call(size, model, (x, scale), {}, {}, **options), model(x, scale)
        between = torch.ones(2**26, device=device)  # takes what a capture has given back
        assert torch.allclose(result, expected, rtol=1e-3, atol=1e-3) and between.sum() == 2**26

    with torch.inference_mode():
        for fails in ("raises", "waits", "keeps", "garbage", ""):
            kept = []
            graphs, model = ModelGraphs(), made(fails, kept)
            graphs.drop_if_stale(torch.nn.Linear(2, 2).to(device), device)
            for step in range(4):
                for size in (32, 48):
                    check(graphs, model, size, step)
            expected = {"raises": (0, 0), "waits": (0, 0), "keeps": (2, 0)}.get(fails, (2, 4))
            assert (graphs.captures, graphs.replays) == expected, (fails, graphs.failures)
            if fails == "":  # a library's workspace that belonged to a dropped graph would be gone
                for generation in range(3):
                    for step in range(3):
                        check(graphs, model, 32, step, code=lambda: generation)  # noqa: B023  called at once
            kept.clear()
            gone = weakref.ref(model)
            del graphs, model
            gc.collect()
            assert gone() is None, "a failed capture keeps the model"
    print("capture and replay work", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
