"""Whose device it is."""

from __future__ import annotations

import torch


def is_nvidia(device: torch.device) -> bool:
    """Whether what was measured on an NVIDIA card may hold for `device`; PyTorch for AMD's cards calls them cuda as well."""
    return device.type == "cuda" and torch.version.hip is None
