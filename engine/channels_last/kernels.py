"""Compute the group norm of images in channels_last, and convert weights to that layout, with Triton kernels.

PyTorch's group norm first copies an image in channels_last to the contiguous layout. cuDNN's 16-bit convolutions want
channels_last, and convert images and weights of other layouts at each call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _CHANNELS = 32, 64
# Programs of `_sum_channels`: a few for each of a large card's multiprocessors.
_PROGRAMS = 512


@triton.jit(do_not_specialize=["share"])
def _sum_channels(x, sums, pixels, channels, share, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """For each channel and share of the pixels: the sums of (value - the first pixel's value), and of that squared."""
    image = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < channels
    base = x + image * pixels * channels
    first = tl.load(base + c, mask=there, other=0.0).to(tl.float32)  # squares of values far from 0 lose their differences
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, pixels)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & there[None, :]
        value = tl.load(base + row[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - first[None, :], 0.0)
        total += value
        squares += value * value
    out = sums + (image * tl.num_programs(0) + tl.program_id(0)) * 2 * channels + c
    tl.store(out, tl.sum(total, 0), mask=there)
    tl.store(out + channels, tl.sum(squares, 0), mask=there)


@triton.jit(do_not_specialize=["shares", "width"])
def _find_factors(x, sums, weight, bias, factors, pixels, channels, shares, width, eps, WIDTH: tl.constexpr):
    """For each channel of one group: the factor and the summand of the norm, see `factors_of`."""
    image = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    there = lane < width
    c = tl.program_id(0) * width + lane
    total = tl.zeros((WIDTH,), tl.float32)
    squares = tl.zeros((WIDTH,), tl.float32)
    for index in range(shares):
        at = sums + (image * shares + index) * 2 * channels + c
        total += tl.load(at, mask=there, other=0.0)
        squares += tl.load(at + channels, mask=there, other=0.0)
    shift = total / pixels
    mean = tl.load(x + image * pixels * channels + c, mask=there, other=0.0).to(tl.float32) + shift
    spread = squares / pixels - shift * shift
    center = tl.sum(tl.where(there, mean, 0.0), 0) / width
    away = mean - center
    variance = tl.sum(tl.where(there, spread + away * away, 0.0), 0) / width
    factor = tl.load(weight + c, mask=there, other=0.0).to(tl.float32) / tl.sqrt(variance + eps)
    out = factors + image * 2 * channels + c
    tl.store(out, factor, mask=there)
    tl.store(out + channels, tl.load(bias + c, mask=there, other=0.0).to(tl.float32) - center * factor, mask=there)


@triton.jit
def _apply_factors(x, factors, out, size, channels, SILU: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    c = index % channels
    at = factors + image * 2 * channels + c
    value = tl.load(x + image * size + index, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(at, mask=inside, other=0.0) + tl.load(at + channels, mask=inside, other=0.0)
    if SILU:  # of the rounded value, as a separate kernel would compute it
        value = value.to(out.dtype.element_ty).to(tl.float32)
        value = value * tl.sigmoid(value)
    tl.store(out + image * size + index, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_weight(weight, out, channels, taps, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """`[channels, taps]` to `[taps, channels]`, for each output channel."""
    base = tl.program_id(0).to(tl.int64) * channels * taps
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.arange(0, TAPS)
    inside = (c < channels)[:, None] & (t < taps)[None, :]
    tile = tl.trans(tl.load(weight + base + c[:, None] * taps + t[None, :], mask=inside, other=0.0))
    tl.store(out + base + t[:, None] * channels + c[None, :], tile, mask=(t < taps)[:, None] & (c < channels)[None, :])


# True in `only_compiling`.
_compiles_only: ContextVar[bool] = ContextVar("compiles_only", default=False)


@contextmanager
def only_compiling() -> Iterator[None]:
    """A context in which kernels are compiled for the current device but do not run: their tensors may be on the CPU."""
    token = _compiles_only.set(True)
    try:
        yield
    finally:
        _compiles_only.reset(token)


def _launched(kernel: Any, *grid: int) -> Callable[..., object]:
    if _compiles_only.get():
        return lambda *args, **options: kernel.warmup(*args, grid=grid, **options)
    return kernel[grid]


def factors_of(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """The group norm of `x` as factors `[images, 2, channels]` in float32: norm(x) = x * factors[:, 0] + factors[:, 1]."""
    images, channels, height, width = x.shape
    pixels = height * width
    columns = triton.cdiv(channels, _CHANNELS)
    share = max(_ROWS, triton.cdiv(pixels, max(1, _PROGRAMS // (columns * images))))
    shares = triton.cdiv(pixels, share)
    sums = torch.empty(images, shares, 2, channels, dtype=torch.float32, device=x.device)
    factors = torch.empty(images, 2, channels, dtype=torch.float32, device=x.device)
    _launched(_sum_channels, shares, columns, images)(x, sums, pixels, channels, share, _ROWS, _CHANNELS)
    each = channels // groups
    padded = max(128, triton.next_power_of_2(each))  # 128 is the widest usual group: one kernel serves all
    args = (x, sums, weight, bias, factors, pixels, channels, shares, each, eps, padded)
    _launched(_find_factors, groups, images)(*args, num_warps=1)
    return factors


def apply_factors(x: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, silu: bool) -> None:
    """`out` = x * factors[:, 0] + factors[:, 1], with `silu` its SiLU; all channels_last."""
    images, channels, height, width = x.shape
    size = channels * height * width
    _launched(_apply_factors, triton.cdiv(size, 1024), images)(x, factors, out, size, channels, silu, 1024)


def channels_last_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a convolution's weight `[out, in, height, width]` that is channels_last."""
    outputs, channels, height, width = weight.shape
    taps = height * width
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    block = min(128, triton.next_power_of_2(channels))
    _launched(_turn_weight, outputs, triton.cdiv(channels, block))(
        weight, out, channels, taps, block, triton.next_power_of_2(taps)
    )
    return out
