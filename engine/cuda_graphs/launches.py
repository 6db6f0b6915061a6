"""Launch Triton kernels while a CUDA graph is captured from memory of cudaMallocAsync, ComfyUI's default allocator.

Triton's launchers ask the driver about each pointer that comes as a tensor (triton/backends/nvidia/driver.py, `getPointer`),
and the driver knows nothing of memory that belongs to a running capture: "CUDA driver error: invalid argument", or "Pointer
argument cannot be accessed from Triton". A pointer that comes as a number is not asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..torch_compat import private
from ..torch_settings import SharedScope

# Inductor's launchers, and Triton's own: for kernels of ours and of others (SageAttention).
_LAUNCHERS = {
    "inductor": private.switch("run_of_autotuner", late=True),
    "triton": private.switch("call_of_launcher", late=True),
}
_scope = SharedScope(_LAUNCHERS)


@contextmanager
def as_numbers() -> Iterator[None]:
    """While it lasts, a capturing thread hands Triton's kernels addresses in place of tensors."""
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        yield
        return
    with _scope.wrapping(**dict.fromkeys(_LAUNCHERS, _with_addresses)):
        yield


def _with_addresses(launcher: Callable) -> Callable:
    def launches(self: object, *args: object, **kwargs: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return launcher(self, *args, **kwargs)

    return launches
