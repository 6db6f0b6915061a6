"""What two choices of ours for inductor save: norms in one pass, and GELU inside the matrix product before it.

    python -m benchmarks.fusions

Needs a CUDA device. Microseconds on the GPU of a call, launches left out; errors against float64 and float32.
"""

import json
from contextlib import nullcontext

import torch
from torch.nn import functional

from .group_norm import microseconds

NORMS = ((4608, 3072), (512, 3072), (6889, 3072), (14040, 5120), (4096, 3840), (2048, 1280))
PRODUCTS = ((4096, 3072, 12288), (512, 3072, 12288), (6889, 3072, 12288), (14040, 5120, 13824))


def modulated(x, scale, shift):
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def gated(x, update, gate, scale, shift):
    x = x + gate * update
    return x, modulated(x, scale, shift)


def rms(x, weight):
    return functional.rms_norm(x, x.shape[-1:], weight)


def with_gelu(x, weight, bias):
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def compare_norms(one_pass, tokens: int, width: int) -> dict:
    x, update, row, weight = random(1, tokens, width), random(1, tokens, width), random(1, 1, width), random(width)
    calls = {
        "norm_and_modulation": (modulated, (x, row, row)),
        "gate_norm_and_modulation": (gated, (x, update, row, row, row)),
        "rms_norm": (rms, (x, weight)),
    }
    result = {"kind": "norm in one pass", "tokens": tokens, "width": width, "error": {}}
    exact = modulated(x.double(), row.double(), row.double())
    for name, scope in (("looped", nullcontext), ("one_pass", one_pass)):
        with _fresh(), scope():
            for key, (function, given) in calls.items():
                compiled = torch.compile(function, dynamic=False)
                result.setdefault(key, {})[name] = microseconds(lambda c=compiled, g=given: c(*g))
            result["error"][name] = _error(torch.compile(modulated, dynamic=False)(x, row, row), exact)
    return result


def compare_products(ours, tokens: int, width: int, wide: int) -> dict:
    def behind(x, weight, bias):  # as we have inductor compute it where it stands by itself
        return ours._gelu(None, functional.linear(x, weight, bias), approximate="tanh")

    given = random(tokens, width), random(wide, width) * 0.02, random(wide)
    exact = with_gelu(*(t.float() for t in given))
    found, errors = {}, {}
    for name, function, backend in (("separate", behind, "inductor"), ("inside", with_gelu, ours.inductor)):
        with _fresh():
            compiled = torch.compile(function, dynamic=False, backend=backend)
            errors[name] = _error(compiled(*given), exact)
            found[name] = microseconds(lambda c=compiled: c(*given))
    found["product_alone"] = microseconds(lambda: functional.linear(*given))
    sizes = {"tokens": tokens, "width": width, "wide": wide}
    return {"kind": "gelu in a product", **sizes, "microseconds": found, "error": errors}


def _fresh():
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    return fresh_cache()


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{((result.double() - exact.double()).norm() / exact.double().norm()).item():.3g}")


def main() -> None:
    from engine.inductor import backend as inductor
    from engine.inductor.persistent_reductions import in_one_pass

    with torch.inference_mode():
        for sizes in NORMS:
            print("ROW", json.dumps(compare_norms(in_one_pass, *sizes)), flush=True)
        for sizes in PRODUCTS:
            print("ROW", json.dumps(compare_products(inductor, *sizes)), flush=True)


if __name__ == "__main__":
    main()
