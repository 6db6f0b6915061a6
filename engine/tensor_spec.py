"""Describe a tensor without its data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


def hint(size: Any) -> Any:
    """The number that a symbolic size had when the graph was traced; any other value as it is."""
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def is_symbol(value: Any) -> bool:
    """Whether an input of a graph is a size that varies; PyTorch also passes a SymInt that has turned out constant."""
    return isinstance(value, torch.SymInt) and not value.node.expr.is_number


class TensorSpec(NamedTuple):
    """Shape, strides, dtype and device of a strided tensor, without offset."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride())), tensor.dtype, tensor.device)

    @property
    def extent(self) -> int:
        """The number of elements of memory that the tensor spans."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.extent * self.dtype.itemsize

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(memory, 0, self.shape, self.stride)

    def zeros(self) -> torch.Tensor:
        return self.on(torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage())
