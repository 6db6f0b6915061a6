"""Rotate and quantise activations, and multiply int8 matrices, with Triton kernels for Hopper.

`rotate` is ConvRot's rotation (arXiv 2512.03673; comfy_kitchen/tensor/int8_utils.py): each group of 256 channels times the
regular Hadamard matrix H4 x H4 x H4 x H4. With S the 4x4 matrix of ones, H4 is S - 2 I with its rows reversed, so that the
product is four sums of four for each value.
"""

import torch
import triton
import triton.language as tl
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 256
# Rows, columns and depth of a tile, warps, stages: for many tiles, and for fewer than the GPU has multiprocessors.
_LARGE, _SMALL = (256, 128, 128, 8, 4), (128, 128, 128, 4, 4)


@triton.jit
def _rotate(x, values, scales, channels, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, GROUPS * 256)
    there = at < channels
    v = tl.load(x + row * channels + at, mask=there, other=0.0).to(tl.float32)
    v = tl.reshape(v, (GROUPS, 4, 4, 4, 4))
    v = tl.sum(v, 4, keep_dims=True) - 2 * v
    v = tl.sum(v, 3, keep_dims=True) - 2 * v
    v = tl.sum(v, 2, keep_dims=True) - 2 * v
    v = tl.sum(v, 1, keep_dims=True) - 2 * v
    v = tl.reshape(v, (GROUPS * 256,)) * 0.0625
    largest = tl.max(tl.abs(v), 0)
    if x.dtype.element_ty == tl.float16:
        largest = tl.minimum(largest, 65504.0)  # a row with inf stays finite
    scale = tl.maximum(largest / 127.0, 1e-30)
    # Rounded to x's type three times, as kitchen's kernel does (int8_linear.cu, quant_div_float_to_float); then half to even:
    # floats from 2**23 on have no fractions.
    v, by = v.to(x.dtype.element_ty).to(tl.float32), scale.to(x.dtype.element_ty).to(tl.float32)
    v = tl.div_rn(v, by).to(x.dtype.element_ty).to(tl.float32) + 12582912.0 - 12582912.0
    v = tl.minimum(tl.maximum(v, -128.0), 127.0)
    tl.store(values + row * channels + (at // 256) * 256 + 255 - at % 256, v.to(tl.int8), mask=there)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["m"])
def _product(
    x, w, out, x_scales, w_scales, bias, m, n, k, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = tl.program_id(0) // (8 * tiles_n) * 8  # eight rows of tiles at a time: what they read stays in the L2 cache
    height = tl.minimum(tiles_m - first, 8)
    i = first + tl.program_id(0) % (8 * tiles_n) % height
    j = tl.program_id(0) % (8 * tiles_n) // height
    sums = tl.zeros((BM, BN), tl.int32)
    for at in range(0, k, BK):
        sums = tl.dot(x.load([i * BM, at]), w.load([j * BN, at]).T, sums, out_dtype=tl.int32)
    rows, columns = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    row_there, column_there = rows < m, columns < n
    x_scale = tl.load(x_scales + rows, mask=row_there, other=0.0)
    w_scale = tl.load(w_scales + columns, mask=column_there, other=0.0)
    y = sums.to(tl.float32) * (x_scale[:, None] * w_scale[None, :])
    if HAS_BIAS:
        y += tl.load(bias + columns, mask=column_there, other=0.0).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def rotate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, channels] -> int8 of that shape, and float32 scales [rows, 1]. Channels must be a multiple of GROUP."""
    rows, channels = x.shape
    values = torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty(rows, 1, device=x.device, dtype=torch.float32)
    _rotate[(rows,)](x, values, scales, channels, **_rotation(channels))
    return values, scales


def _rotation(channels: int) -> dict:
    return {"GROUPS": triton.next_power_of_2(channels // GROUP), "num_warps": 4}


def product(x, x_scales, weight, w_scales, bias, dtype: torch.dtype) -> torch.Tensor:
    """`x @ weight.T` of int8 [rows, k] and [columns, k], times the scales of rows and columns, plus `bias` or None.

    `k` must be a multiple of 16.
    """
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, device=x.device, dtype=dtype)
    if m == 0:  # CUDA describes no matrix without rows
        return out
    size = _LARGE if _tiles(_LARGE, m, n) >= _multiprocessors(x.device) else _SMALL
    inputs = (_in_tiles(x, size[0], size[2]), _in_tiles(weight, size[1], size[2]), out, x_scales, w_scales)
    _product[(_tiles(size, m, n),)](*inputs, w_scales if bias is None else bias, m, n, k, **_tiling(size, bias is not None))
    return out


def compile_for(channels: int, dtype: torch.dtype) -> None:
    """Have Triton compile what `rotate` and `product` need for layers of so many inputs, without running it."""
    if channels % GROUP == 0:
        _rotate.warmup(dtype, torch.int8, torch.float32, channels, grid=(1,), **_rotation(channels))
    for size in (_LARGE, _SMALL):
        x, w = (_in_tiles(_Fake(torch.int8), rows, size[2]) for rows in size[:2])
        for has_bias in (True, False):
            inputs = (x, w, dtype, torch.float32, torch.float32, dtype if has_bias else torch.float32, 1000, 1024, 1024)
            _product.warmup(*inputs, grid=(1,), **_tiling(size, has_bias))


class _Fake(MockTensor):
    shape = (1024, 1024)

    @staticmethod
    def stride():
        return 1024, 1


def _in_tiles(matrix, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _tiling(size: tuple, has_bias: bool) -> dict:
    rows, columns, depth, warps, stages = size
    return {"HAS_BIAS": has_bias, "BM": rows, "BN": columns, "BK": depth, "num_warps": warps, "num_stages": stages}


def _tiles(size: tuple, m: int, n: int) -> int:
    return triton.cdiv(m, size[0]) * triton.cdiv(n, size[1])


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
