"""Weights that another pack keeps packed (GGUF): tensors of a class of its own, and layers that unpack them."""

import torch
from torch import nn

BLOCK = 32


class Packed(torch.Tensor):
    """As that pack has it: attributes, methods of its own in PyTorch's names, and a shape that is not that of its data."""

    def __new__(cls, data, *_):
        return super().__new__(cls, data)

    def __init__(self, data, kind, unpacked, lora=()):
        super().__init__()
        self.kind, self.unpacked, self.lora = kind, unpacked, lora

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.kind, moved.unpacked, moved.lora = self.kind, self.unpacked, self.lora
        return moved

    def clone(self, *_, **__):
        return self

    def detach(self, *_, **__):
        return self

    @property
    def shape(self):
        return self.unpacked if hasattr(self, "unpacked") else self.size()


def packed(weight, kind):
    """Blocks of numbers in a byte each, behind half a float that scales them; `kind`: how that float is meant."""
    blocks = weight.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 100
    numbers = (blocks / scale).round().to(torch.int8)
    kept = (scale if kind == "times" else 1 / scale).half()
    data = torch.cat([kept.view(torch.uint8), numbers.view(torch.uint8)], 1)
    return Packed(data.reshape(weight.shape[0], -1), kind, weight.shape)


def unpacked(weight):
    blocks = weight.data.reshape(-1, BLOCK + 2).view(torch.uint8)
    scale, numbers = blocks[:, :2].view(torch.half), blocks[:, 2:].view(torch.int8)
    values = numbers * scale if weight.kind == "times" else numbers / scale
    plain = values.reshape(weight.shape).float()
    for down, up, strength in weight.lora:
        plain = plain + strength * (up @ down)
    return plain


class PackedLinear(nn.Linear):
    comfy_cast_weights = True

    def forward(self, x):
        return nn.functional.linear(x, torch.Tensor(unpacked(self.weight.to(x.device))), self.bias)


class StubbornLinear(PackedLinear):
    """PyTorch gives up in the middle of it."""

    def forward(self, x):
        return nn.functional.linear(x, unpacked(self.weight.to(x.device)).as_subclass(torch.Tensor), self.bias)


def pack(patcher, kinds=("times", "over"), layer_class=PackedLinear):
    """The Linear layers of each single block, in turn of these kinds; they look alike from outside."""
    for number, block in enumerate(patcher.model.diffusion_model.single_blocks):
        for layer in (block.linear1, block.linear2):
            layer.__class__ = layer_class
            if not isinstance(layer.weight, Packed):
                layer.weight = nn.Parameter(packed(layer.weight.detach(), kinds[number % len(kinds)]), requires_grad=False)
