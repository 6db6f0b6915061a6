"""Packed weights in layers that we do not know, so that the unpacking is traced: ComfyUI-GGUF's tensors, other layers."""

import torch
from torch import nn

from .gguf_pack import GGMLTensor, Kind, dequantize_tensor, packed


class PackedLinear(nn.Linear):
    comfy_cast_weights = True

    def unpacked(self, device):
        weight = self.weight.to(device)
        plain = dequantize_tensor(weight).float()
        for down, up, strength in weight.patches:
            plain = plain + strength * (up @ down)
        return plain

    def forward(self, x):
        return nn.functional.linear(x, torch.Tensor(self.unpacked(x.device)), self.bias)


class StubbornLinear(PackedLinear):
    """PyTorch gives up in the middle of it."""

    def forward(self, x):
        return nn.functional.linear(x, self.unpacked(x.device).as_subclass(torch.Tensor), self.bias)


def pack(patcher, kinds=(Kind.TIMES, Kind.OVER), layer_class=PackedLinear):
    """The Linear layers of each single block, in turn of these kinds; they look alike from outside."""
    for number, block in enumerate(patcher.model.diffusion_model.single_blocks):
        for layer in (block.linear1, block.linear2):
            layer.__class__ = layer_class
            if not isinstance(layer.weight, GGMLTensor):
                layer.weight = packed(layer.weight, kinds[number % len(kinds)])
