"""Stand in for comfy-aimdo, the memory of ComfyUI's dynamic VRAM, in a process without a card; see nodes/prebuild.py.

To be called before ComfyUI is imported. All weights have pages, which are filled once and stay.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

PAGE = 512  # as comfy-aimdo aligns (model_vbar.py, `alloc`)


def _nothing(*_args: Any, **_kwargs: Any) -> int:
    return 0


class _Quiet:
    """An object whose methods do nothing."""

    size = 0

    def __init__(self, *_args: Any, **_kwargs: Any):
        self.base_addr = self.offset = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class _Pages(_Quiet):
    """In place of `ModelVBAR`."""

    def alloc(self, count: int) -> tuple:
        begin = -(-self.offset // PAGE) * PAGE
        self.offset = begin + count
        return self, begin, count

    def get_watermark(self) -> int:
        return 2**40


def begin() -> None:
    """Does nothing where there is no comfy-aimdo."""
    answers: dict[str, dict[str, Any]] = {
        "control": {
            **dict.fromkeys(("init", "init_device", "init_devices"), lambda *_args, **_kwargs: True),
            **{f"set_log_{level}": _nothing for level in ("debug", "detail", "info", "warning", "error", "critical", "none")},
        },
        "model_vbar": {
            "ModelVBAR": _Pages,
            "vbar_fault": lambda _allocation: 1,
            "vbar_unpin": _nothing,
            "vbar_signature_compare": lambda one, other: one is not None and one == other,
        },
        "torch": {"aimdo_to_tensor": lambda at, device: torch.empty(at[2], dtype=torch.uint8, device=device)},
        "host_buffer": {"HostBuffer": _Quiet, "cleanup_file_reader": _nothing},
    }
    for name, functions in answers.items():
        try:
            module = importlib.import_module(f"comfy_aimdo.{name}")
        except ImportError:
            return
        for function, answer in functions.items():
            setattr(module, function, answer)
