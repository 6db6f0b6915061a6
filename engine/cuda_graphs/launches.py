"""Launch Triton kernels while a CUDA graph is captured from memory of cudaMallocAsync, ComfyUI's default allocator.

Triton's launchers ask the driver about each pointer that comes as a tensor (triton/backends/nvidia/driver.py, `getPointer`),
and the driver knows nothing of memory that belongs to a running capture: "CUDA driver error: invalid argument". A pointer that
comes as a number is not asked about.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..torch_settings import SharedScope, late_method

_read, _write = late_method("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "run")
_scope = SharedScope({"run": (_read, _write)})
# How kernels of our own were launched before, by all that Triton compiles them for.
_launched: dict[tuple, Any] = {}


def as_numbers() -> AbstractContextManager:
    """While it lasts, a capturing thread hands inductor's kernels addresses in place of tensors."""
    found = _read()
    if found is None or torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        return nullcontext()

    def run(self, *args: object, **kwargs: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(map(_address, args))
        return found(self, *args, **kwargs)

    return _scope.applied(run=run)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: object) -> None:
    """`kernel[grid](*args, **options)`, also while a graph is captured, if it was launched like that before."""
    key = (kernel, args[0].device, tuple(options.items()), *map(_form, args))
    if key in _launched and args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _launched[key][(*grid, 1, 1)[:3]](*map(_address, args))
    else:
        _launched[key] = kernel[grid](*args, **options)


def _address(value: object) -> object:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _form(value: object) -> object:
    """What Triton compiles for: types and alignment of tensors, and numbers."""
    return (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
