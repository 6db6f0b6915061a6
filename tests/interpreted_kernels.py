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

from engine.channels_last import kernels  # noqa: E402

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
