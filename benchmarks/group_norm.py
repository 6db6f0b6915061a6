"""The kernels for channels_last images beside PyTorch's own: microseconds on the GPU, and how far both are from float64.

    python -m benchmarks.group_norm

Needs a CUDA device. Shapes are those of SDXL and SD 1.5, two images at once.
"""

import json
import types

import torch
from torch.nn import functional

SHAPES = ((320, 128), (640, 64), (960, 128), (1280, 32), (2560, 32), (320, 64), (1280, 16), (1280, 8))
CALLS, ROUNDS = 20, 5


def microseconds(function) -> float:
    """Of one call on the GPU, launches left out."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS * 1000)
    return round(min(times), 1)


def compare(kernels: types.ModuleType, channels: int, side: int) -> dict:
    x = torch.randn(2, channels, side, side, device="cuda", dtype=torch.half) + 3
    scale, shift = torch.randn(2, channels, device="cuda", dtype=torch.half)
    weight = torch.randn(channels, channels, 3, 3, device="cuda", dtype=torch.half) * 0.02
    turned = x.contiguous(memory_format=torch.channels_last)
    turned_weight = kernels.channels_last_weight(weight)
    if not torch.equal(turned_weight, weight):
        raise SystemExit("the turned weight is another one")

    def eager(x=x, scale=scale, shift=shift):
        return functional.silu(functional.group_norm(x, 32, scale, shift))

    def ours():
        out = torch.empty_like(turned)
        kernels.apply_factors(turned, kernels.factors_of(turned, 32, scale, shift, 1e-5), out, True)
        return out

    exact = eager(x.double(), scale.double(), shift.double())

    def error(result):
        return float(f"{((result.double() - exact).norm() / exact.norm()).item():.3g}")

    return {
        "kind": "group norm",
        "channels": channels,
        "side": side,
        "norm_and_silu": {"eager": microseconds(eager), "ours": microseconds(ours)},
        "convolution": {
            "eager": microseconds(lambda: functional.conv2d(x, weight, padding=1)),
            "channels_last": microseconds(lambda: functional.conv2d(turned, turned_weight, padding=1)),
            "turning_the_weight": microseconds(lambda: kernels.channels_last_weight(weight)),
        },
        "error": {"eager": error(eager()), "ours": error(ours())},
    }


def main() -> None:
    from engine.cuda_graphs import group_norm as group_norm_kernels

    for channels, side in SHAPES:
        print("ROW", json.dumps(compare(group_norm_kernels, channels, side)), flush=True)


if __name__ == "__main__":
    main()
