"""The operator `torch_compile_kit::unpack`, which graphs call for a packed weight (`host/weights/unpacking.py`).

The compile process imports this, too: there the operator must be known, though no weight is.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

# By number: what holds a packed weight, and gives it in a dtype.
weights: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@torch.library.custom_op("torch_compile_kit::unpack", mutates_args=())
def unpack(number: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not int(number):  # inductor passes zeros when it times kernels
        return torch.zeros(shape, dtype=dtype, device=device)
    return weights[int(number)].unpacked(dtype)


unpack.register_fake(lambda number, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device))
