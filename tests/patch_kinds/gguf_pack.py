"""What city96's ComfyUI-GGUF has of Linear layers (ops.py, dequant.py), with two packings of its own."""

import types
from enum import Enum

import torch
from torch import nn

BLOCK = 32


class Kind(Enum):
    TIMES = 1
    OVER = 2
    F32 = 3


gguf = types.SimpleNamespace(GGML_QUANT_SIZES=dict.fromkeys((Kind.TIMES, Kind.OVER), (BLOCK, BLOCK + 2)))


class GGMLTensor(torch.Tensor):
    def __new__(cls, data, **_):
        return super().__new__(cls, data)

    def __init__(self, data, tensor_type, tensor_shape, patches=()):
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, patches

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.tensor_type = getattr(self, "tensor_type", None)
        moved.tensor_shape = getattr(self, "tensor_shape", moved.data.shape)
        patches = getattr(self, "patches", ())
        moved.patches = patches.copy() if isinstance(patches, list) else patches
        return moved

    def clone(self, *_, **__):
        return self

    def detach(self, *_, **__):
        return self

    @property
    def shape(self):
        return self.tensor_shape if hasattr(self, "tensor_shape") else self.size()


def dequantize_blocks(blocks, kind, dtype):
    scale, numbers = blocks[:, :2].view(torch.half).to(dtype), blocks[:, 2:].view(torch.int8)
    return numbers * scale if kind is Kind.TIMES else numbers / scale


dequantize_functions = dict.fromkeys((Kind.TIMES, Kind.OVER), dequantize_blocks)


def dequantize(data, qtype, oshape, dtype=None):
    _, type_size = gguf.GGML_QUANT_SIZES[qtype]
    rows = data.reshape((-1, data.shape[-1])).view(torch.uint8)
    return dequantize_functions[qtype](rows.reshape((-1, type_size)), qtype, dtype).reshape(oshape)


def dequantize_tensor(tensor, dtype=None, dequant_dtype=None):
    if tensor.tensor_type not in dequantize_functions:
        return tensor.to(dtype)
    dequant_dtype = dtype if dequant_dtype == "target" else dequant_dtype
    return dequantize(tensor.data, tensor.tensor_type, tensor.tensor_shape, dtype=dequant_dtype).to(dtype)


class GGMLLinear(nn.Linear):
    comfy_cast_weights = True
    dequant_dtype = None

    def get_weight(self, tensor, dtype):
        weight = dequantize_tensor(tensor, dtype, self.dequant_dtype)
        if isinstance(weight, GGMLTensor):
            weight = torch.Tensor(weight)
        for down, up, strength in tensor.patches:
            weight = weight + strength * (up @ down).to(dtype)
        return weight

    def forward(self, x):
        return self.forward_comfy_cast_weights(x)

    def forward_comfy_cast_weights(self, input):
        bias = None if self.bias is None else self.get_weight(self.bias.to(input.device), input.dtype)
        return nn.functional.linear(input, self.get_weight(self.weight.to(input.device), input.dtype), bias)


def packed(weight, kind):
    """Blocks of numbers in a byte each, after half a float that scales them; `kind`: how that float is meant."""
    blocks = weight.detach().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 100
    kept = (scale if kind is Kind.TIMES else 1 / scale).half()
    data = torch.cat([kept.view(torch.uint8), (blocks / scale).round().to(torch.int8).view(torch.uint8)], 1)
    tensor = GGMLTensor(data.reshape(weight.shape[0], -1), tensor_type=kind, tensor_shape=weight.shape)
    return nn.Parameter(tensor, requires_grad=False)


def pack(patcher, kinds=(Kind.TIMES, Kind.OVER)):
    """The Linear layers of each single block, in turn of these kinds."""
    for number, block in enumerate(patcher.model.diffusion_model.single_blocks):
        for layer in (block.linear1, block.linear2):
            layer.__class__, layer.weight = GGMLLinear, packed(layer.weight, kinds[number % len(kinds)])
            bias = GGMLTensor(layer.bias.detach().float(), tensor_type=Kind.F32, tensor_shape=layer.bias.shape)
            layer.bias = nn.Parameter(bias, requires_grad=False)
