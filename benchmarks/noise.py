"""How far eager runs with different attention kernels are apart: the noise to judge a compiled run's error by."""

from importlib import import_module

import torch
from torch.nn.attention import SDPBackend

from . import session

KERNELS = {
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
}


def attention_noise(patcher, model: str, steps: int, device: str, expected) -> dict[str, float]:
    """Relative error of the final latent against plain eager, per kernel that this device can run for all of the model.

    Args:
        patcher: the model, not compiled.
        expected: the final latent of plain eager.
    """
    attention = import_module(f"{session.KIT}.engine.inductor.attention_kernels")
    found = {}
    for kernel in KERNELS[device]:
        override = _Counted(attention.override_with([kernel]), attention.HOST_FUNCTION)
        other = patcher.clone()
        other.model_options["transformer_options"]["optimized_attention_override"] = override
        try:
            latent, _ = session.sample(other, model, steps)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"not measured with {kernel.name}: {error}")
            continue
        if override.calls:  # else the host ran what it always runs
            found[kernel.name] = session.relative_error(latent, expected)
    return found


class _Counted:
    """The override, with the number of calls that it did not hand back to the host."""

    def __init__(self, override, host_function: str):
        self._override, self._host_function, self.calls = override, host_function, 0

    def __call__(self, func, *args, **kwargs):
        self.calls += func.__name__ == self._host_function and not kwargs.get("enable_gqa", False)
        return self._override(func, *args, **kwargs)
