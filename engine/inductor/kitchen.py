"""Replace comfy-kitchen's matrix products by operators while blocks are traced and lowered.

Most of comfy-kitchen's functions are operators of PyTorch. Its products with 4-bit weights (ConvRot W4A4, W4A8) and newer ones
(`fp16_linear`) are Python code that ends in a kernel, or reads a cached matrix: PyTorch can trace neither, and the block would
run uncompiled. These products ask comfy-kitchen's registry for the implementation that fits the arguments. While a graph is
made, the registry returns an operator; when the operator runs, it asks the registry again.
"""

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..torch_compat import private
from ..torch_settings import SharedScope, attribute

try:
    from comfy_kitchen.backends import eager
    from comfy_kitchen.registry import BackendRegistry, registry

    _choose = BackendRegistry.get_implementation
except (ImportError, AttributeError):  # ComfyUI before it had quantised formats, or another comfy-kitchen: no operators
    registry = None

# Names of the argument that is the weight. The weight's rows are the output's channels.
_WEIGHTS = ("weight", "qweight", "qdata")
_operators: dict[str, Callable] = {}
_lock = threading.Lock()
_scope = SharedScope({"choose": attribute(BackendRegistry, "get_implementation")} if registry else {})


def _operator(name: str) -> Callable[..., torch.Tensor] | None:
    """An operator with the arguments of comfy-kitchen's own Python version of the product; None if there is no such product."""
    plain = getattr(eager, name)
    try:
        schema = torch.library.infer_schema(plain, mutates_args=())
        parameters = inspect.signature(plain).parameters
        weight = next(word for word in _WEIGHTS if word in parameters and "x" in parameters)
    except (TypeError, ValueError, StopIteration):
        return None

    def product(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        return _choose(registry, name, kwargs=arguments)(**arguments).contiguous()

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        x = arguments["x"]
        return x.new_empty((*x.shape[:-1], arguments[weight].shape[0]), dtype=arguments.get("out_dtype"))

    operator = torch.library.custom_op(f"torch_compile_kit::kitchen_{name}", product, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _get_implementation(self: Any, func_name: str, backend: str | None = None, kwargs: dict | None = None) -> Callable:
    if func_name in _operators and (torch.compiler.is_compiling() or _is_fake((kwargs or {}).get("x"))):
        return _operators[func_name]
    return _choose(self, func_name, backend, kwargs)


def _is_fake(x: torch.Tensor | None) -> bool:
    return type(x) is not torch.Tensor and private.detect_fake_mode((x,)) is not None


def register() -> None:
    """Make the operators, which lowered code calls."""
    with _lock:
        if registry is not None and not _operators:
            _operators.update({name: operator for name in dir(eager) if "_linear" in name and (operator := _operator(name))})


def products_as_operators() -> AbstractContextManager:
    """A context for tracing and running graphs, with operators for these products: Dynamo guards the registry's method."""
    # Another pack's replacement of the method stays in charge.
    if registry is None or BackendRegistry.get_implementation not in (_choose, _get_implementation):
        return nullcontext()
    register()
    return _scope.applied(choose=_get_implementation)
