"""A script: our Triton kernels in Triton's interpreter, beside PyTorch in float64. Prints a row of JSON for each shape.

TRITON_INTERPRET must be set before Triton is imported, and holds for the process.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def patch_tensor(tensor, scope):
    """Newer numpy makes no number of an array of one, which the interpreter's loops ask for."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch_tensor

from engine.cuda_graphs import group_norm as kernels  # noqa: E402
from engine.inductor import int8_kernels, int8_products  # noqa: E402

# images, channels, height, width, groups
SHAPES = [(2, 64, 8, 8, 32), (1, 320, 7, 5, 32), (3, 48, 2, 2, 4), (1, 160, 9, 9, 1), (2, 30, 33, 3, 15), (1, 96, 16, 16, 96)]
WEIGHTS = [(8, 4, 3, 3), (5, 130, 3, 3), (4, 1, 7, 7), (3, 200, 1, 3)]

generator = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=generator)


for images, channels, height, width, groups in SHAPES:
    for offset in (0.0, 100.0):
        x = (random(images, channels, height, width) + offset).half().contiguous(memory_format=torch.channels_last)
        scale, shift = random(channels).half(), random(channels).half()
        exact = functional.group_norm(x.double(), groups, scale.double(), shift.double())
        errors = {}
        for silu, expected in ((False, exact), (True, functional.silu(exact))):
            out = torch.full_like(x, float("nan"))
            kernels.apply_factors(x, kernels.factors_of(x, groups, scale, shift, 1e-5), out, silu)
            errors["silu" if silu else "norm"] = ((out.double() - expected).norm() / expected.norm()).item()
        print(json.dumps({"shape": [images, channels, height, width, groups], "offset": offset, **errors}))
for shape in WEIGHTS:
    weight = random(*shape).half()
    turned = kernels.channels_last_weight(weight)
    same = torch.equal(turned, weight) and turned.is_contiguous(memory_format=torch.channels_last)
    print(json.dumps({"weight": shape, "same": same}))
for dtype in (torch.float32, torch.float16):  # the interpreter rounds bf16 down
    for rows, channels in ((3, 768), (2, 256)):
        x = random(rows, channels).to(dtype)
        values, scales = int8_kernels.rotate(x)
        expected, expected_scales = int8_products.rotated_on_cpu(x)
        row = {"rotated": [rows, channels], "differ": (values != expected).float().mean().item()}
        print(json.dumps({**row, "scales": ((scales - expected_scales).abs() / expected_scales).max().item()}))
for rows, columns, channels, with_bias in ((40, 160, 272, True), (300, 144, 128, False)):
    x, weight = (torch.randint(-127, 128, (n, channels), generator=generator, dtype=torch.int8) for n in (rows, columns))
    x_scales, w_scales, bias = random(rows, 1).abs(), random(columns).abs(), random(columns) if with_bias else None
    y = int8_kernels.product(x, x_scales, weight, w_scales, bias, torch.float32)
    exact = (x.double() @ weight.double().t()) * x_scales.double() * w_scales.double()
    exact = exact if bias is None else exact + bias.double()
    print(json.dumps({"product": [rows, columns, channels], "error": ((y - exact).norm() / exact.norm()).item()}))
