"""What our Triton kernels for channels_last do, in plain PyTorch."""

import types

import torch
from torch.nn import functional


class Reference(types.SimpleNamespace):
    """In place of `channels_last/kernels.py`; counts what it is asked for."""

    def __init__(self):
        super().__init__(norms=0, writes=0, with_silu=0, weights=0)

    def factors_of(self, x, groups, weight, bias, eps):
        assert x.is_contiguous(memory_format=torch.channels_last)
        self.norms += 1
        grouped = x.unflatten(1, (groups, -1)).flatten(2)
        variance, mean = torch.var_mean(grouped, 2, correction=0)
        each = x.shape[1] // groups
        factors = weight / torch.sqrt(variance + eps).repeat_interleave(each, 1)
        return torch.stack([factors, bias - mean.repeat_interleave(each, 1) * factors], 1)

    def apply_factors(self, x, factors, out, silu):
        assert out.is_contiguous(memory_format=torch.channels_last)
        self.writes += 1
        self.with_silu += silu
        result = x * factors[:, 0, :, None, None] + factors[:, 1, :, None, None]
        out.copy_(functional.silu(result) if silu else result)

    def channels_last_weight(self, weight):
        self.weights += 1
        return weight.contiguous(memory_format=torch.channels_last)
