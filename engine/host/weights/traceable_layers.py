"""Make quantised and packed (GGUF) layers of a block traceable, or keep them out of its graph.

Quantised: with native fp8, mxfp8 or nvfp4 matrix products the host's cast reads `input.params` of a tensor that was quantised
inside the graph (comfy/ops.py, `cast_bias_weight`), which PyTorch cannot trace: a graph break at every layer. The tensor's own
dtype and device are the same, so the cast gets those while blocks run compiled.

Packed: weights are tensors of another pack's class, which the layer's forward unpacks. In Linear layers of ComfyUI-GGUF an
operator unpacks the weight (unpacking.py). In other layers the unpacking is traced if the class only adds attributes and
methods to PyTorch's tensor: the unpacking becomes a kernel of the graph, with a guard on the kind of packing. A layer runs
eager if its weight's class changes how operations run (`_DISPATCH`), if PyTorch would set no such guard
(`private.GUARDS_ATTRIBUTES`), or if its unpacking has failed to compile.

Eager: these layers break the graph, and the rest of the block is compiled, as musubi-tuner and sd-scripts do for block swap.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from inspect import getattr_static
from typing import Any

import comfy.ops
import torch
from torch import nn

from ...compile import compiled_code
from ...log import logger
from ...ownership import exchanged
from ...per_model import PerModel
from ...settings import CompileSettings
from ...torch_compat import private
from ...torch_settings import SharedScope, attribute
from ..adapter import host
from .dynamic_vram import parameter
from .partial_load import QUANTIZED, is_known
from .unpacking import has_known_unpacking, weight_of

# Classes of layers in which tracing has failed.
untraceable: set[type] = set()
_DISPATCH = ("__torch_function__", "__torch_dispatch__")


def is_packed(module: nn.Module) -> bool:
    """Whether a weight of the layer has a class of another pack."""
    return not all(is_known(p) for p in module._parameters.values() if p is not None)


def can_be_traced(module: nn.Module) -> bool:
    """Whether Dynamo can trace the layer's unpacking."""
    foreign = [p for p in module._parameters.values() if p is not None and not is_known(p)]
    is_told_apart = len(foreign) < 2 or all(p.is_floating_point() for p in foreign) or private.GUARDS_ATTRIBUTES
    if type(module) in untraceable or not (is_told_apart or _is_hosts(module) or has_known_unpacking(module)):
        return False
    classes = set(map(type, foreign))
    return all(getattr_static(cls, name) is getattr_static(torch.Tensor, name) for cls in classes for name in _DISPATCH)


def _is_hosts(module: nn.Module) -> bool:
    return type(module).__module__.startswith("comfy.")


def _exclude_packed_layers(block: nn.Module) -> bool:
    """After a block failed to compile: run its packed layers eager from now on; returns whether there are any."""
    classes = {type(m) for m in block.modules() if is_packed(m) and can_be_traced(m)}
    untraceable.update(classes)
    if classes:
        logger.info("%s could not be compiled with its packed layers: they run uncompiled", type(block).__name__)
    return bool(classes)


compiled_code.on_compile_failure.append(_exclude_packed_layers)


class PackedWeights:
    """For a call, copy packed weights to the device, still packed, in layers that `can_be_traced`.

    The host's own layers (norms) compute directly with a weight of the pack's class. Their results would have that class, too,
    whose methods PyTorch cannot trace: so for a call these layers get weights of PyTorch's class. The host's layers hold packed
    weights where the host has assigned the tensors of a GGUF file to them, as under dynamic VRAM (comfy/sd.py, `assign`).

    Attributes:
        unpacked: layer -> its `LayerWeight`, for layers in which an operator unpacks the weight.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, settings: CompileSettings):
        self._device = device
        modules = list(modules)
        self.unpacked = {m: weight_of(m) for m in modules if has_known_unpacking(m)}
        for weight in self.unpacked.values():
            weight.settings = settings
        elsewhere = [m for m in modules if any(p is not None and p.device != device for p in m._parameters.values())]
        self.plain = {*filter(_is_hosts, modules)}
        self._modules = {**self.unpacked, **dict.fromkeys((*elsewhere, *self.plain))}
        self.move = bool(elsewhere)

    def resolve(self) -> list[tuple[nn.Module, dict]]:
        return [(m, {name: self._ready(m, p) for name, p in list(m._parameters.items())}) for m in self._modules]

    def _ready(self, module: nn.Module, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None:
            return None
        moved = weight if weight.device == self._device else weight.to(self._device)
        if module in self.plain and not is_known(weight):
            moved = moved.as_subclass(torch.Tensor)
        return weight if moved is weight else parameter(moved)


_host_cast: Any = getattr(comfy.ops, "cast_bias_weight", None)


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None, **kwargs):
    """Call the host's function; while this replacement is installed, pass dtype and device instead of a quantised `input`."""
    if isinstance(input, QUANTIZED) and comfy.ops.cast_bias_weight is cast_bias_weight:
        dtype = input.dtype if dtype is None else dtype
        bias_dtype = dtype if bias_dtype is None else bias_dtype
        device = input.device if device is None else device
        input = None
    return _host_cast(s, input, dtype, device, bias_dtype, **kwargs)


_scope = SharedScope({"cast": attribute(comfy.ops, "cast_bias_weight")})
_has_quantized = PerModel(lambda network: any(isinstance(p, QUANTIZED) for p in network.parameters()))


def traceable_casts(network) -> AbstractContextManager:
    """A context in which casts of quantised layers can be traced; does nothing for a model without such layers."""
    # If another pack has replaced the function, leave that.
    if _has_quantized(network) and host().traceable_cast and comfy.ops.cast_bias_weight in (_host_cast, cast_bias_weight):
        return _scope.applied(cast=cast_bias_weight)
    return nullcontext()


class EagerLayers:
    """Keep some layers of a block out of its graphs while the block runs."""

    needed, paged, in_pages = True, False, False  # as the attributes of `BlockWeights`

    def __init__(self, layers: list[nn.Module]):
        self._eager = [(layer, torch.compiler.disable(layer.forward)) for layer in layers]
        self._scopes = ExitStack()

    def place(self) -> None:
        self._scopes.enter_context(exchanged(dict(self._eager)))

    def release(self) -> None:
        self._scopes.close()

    def drop(self) -> None:
        """Nothing is prefetched."""


def linears(block: nn.Module) -> list[nn.Module]:
    """The layers that hold most weights; by name, since quantised layers are no nn.Linear (comfy/ops.py)."""
    return [m for m in block.modules() if type(m).__name__.endswith("Linear")]
