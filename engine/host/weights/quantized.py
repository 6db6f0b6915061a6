"""Quantised layers inside compiled blocks.

With native fp8, mxfp8 or nvfp4 matrix products the host's cast reads `input.params` of a tensor that was quantised inside the
graph (comfy/ops.py, `cast_bias_weight`), which PyTorch cannot trace: a graph break at every layer. The tensor's own dtype and
device say the same, so while blocks run compiled they are read first.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import comfy.ops

from ...torch_settings import SharedScope
from ..adapter import host

_QUANTIZED = getattr(comfy.ops, "QuantizedTensor", ())
_host_cast: Any = getattr(comfy.ops, "cast_bias_weight", None)


def cast_bias_weight(s, input=None, dtype=None, device=None, bias_dtype=None, **kwargs):
    """The host's function; for a quantised `input` called with what it would read off it."""
    if _QUANTIZED and isinstance(input, _QUANTIZED):
        dtype = input.dtype if dtype is None else dtype
        bias_dtype = dtype if bias_dtype is None else bias_dtype
        device = input.device if device is None else device
        input = None
    return _host_cast(s, input, dtype, device, bias_dtype, **kwargs)


def _set_cast(function) -> None:
    comfy.ops.cast_bias_weight = function


_scope = SharedScope({"cast": (lambda: comfy.ops.cast_bias_weight, _set_cast)})
_quantized: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def traceable_casts(network) -> AbstractContextManager:
    """While it lasts, casts of quantised layers can be traced; nothing for a model that has none."""
    if network not in _quantized:
        _quantized[network] = bool(_QUANTIZED) and any(isinstance(p, _QUANTIZED) for p in network.parameters())
    # Another pack's replacement of the function stays in charge.
    if _quantized[network] and host().traceable_cast and comfy.ops.cast_bias_weight in (_host_cast, cast_bias_weight):
        return _scope.applied(cast=cast_bias_weight)
    return nullcontext()
