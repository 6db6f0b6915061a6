"""Layers whose weights are tensors of another pack's class (GGUF): packed, and unpacked by the layer's own forward as it runs.

A class that only adds attributes and methods to PyTorch's tensor is traced like any other: the unpacking becomes a kernel of
the graph, with a guard on what kind of packing it is. One that takes part in how operations run is left alone, and so are
layers whose unpacking turned out not to compile: they run eager.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from ...compile import compiled_code
from .dynamic_vram import parameter
from .partial_load import is_known

logger = logging.getLogger("torch-compile-kit")
# Classes of layers in which tracing has failed.
untraceable: set[type] = set()
_DISPATCH = ("__torch_function__", "__torch_dispatch__")


def is_packed(module: nn.Module) -> bool:
    """Whether some weight of the layer is of another pack's class."""
    return not all(is_known(p) for p in module._parameters.values() if p is not None)


def can_be_traced(module: nn.Module) -> bool:
    """Whether PyTorch can look into the layer's unpacking."""
    if type(module) in untraceable:
        return False
    classes = {type(p) for p in module._parameters.values() if p is not None and not is_known(p)}
    return all(_function(cls, name) is _function(torch.Tensor, name) for cls in classes for name in _DISPATCH)


def _function(cls: type, name: str) -> object:
    method = getattr(cls, name)
    return getattr(method, "__func__", method)


def _leave_out(block: nn.Module) -> bool:
    """A block could not be compiled: perhaps for its packed layers, which are not tried again; whether there are any."""
    found = {type(m) for m in block.modules() if is_packed(m) and can_be_traced(m)}
    untraceable.update(found)
    if found:
        logger.info("%s could not be compiled with its packed layers: they run eager", type(block).__name__)
    return bool(found)


compiled_code.on_compile_failure.append(_leave_out)


class PackedWeights:
    """The packed weights of one block that are not on the device: copied there for a call, as packed as they are.

    Args:
        modules: layers that `can_be_traced`.
        device: where the model computes.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device):
        self._device = device
        self._modules = [m for m in modules if any(p is not None and p.device != device for p in m._parameters.values())]

    @property
    def move(self) -> bool:
        return bool(self._modules)

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        """The parameters per module, on the device."""
        return [
            (m, {name: p if p is None or p.device == self._device else parameter(p.to(self._device)) for name, p in found})
            for m in self._modules
            for found in [list(m._parameters.items())]
        ]
