"""Elementwise work that cuBLAS can do while it writes a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)


def gelu_in_linear(graph: fx.Graph) -> bool:
    """GELU (by tanh) as part of the linear layer before it, of which nobody else needs the result: the widest tensor of a
    transformer is written once, not written, read and written again (PyTorch: aten/src/ATen/native/cuda/Blas.cpp, Activation).

    Args:
        graph: as Dynamo has traced it; changed in place.

    Returns:
        Whether it was changed.
    """
    found = [(node, linear) for node in graph.nodes if (linear := _linear_before(node)) is not None]
    for gelu, linear in found:
        x, weight, bias = linear.args
        with graph.inserting_before(linear):
            rows = graph.call_function(aten.flatten.using_ints, (x, 0, -2))
            columns = graph.call_function(aten.t.default, (weight,))
            both = graph.call_function(aten._addmm_activation.default, (bias, rows, columns), {"use_gelu": True})
            sizes = [_size(graph, x, dim) for dim in range(x.meta["example_value"].dim() - 1)]
            result = graph.call_function(aten.unflatten.int, (both, 0, sizes))
        result.meta["example_value"] = gelu.meta.get("example_value")
        gelu.replace_all_uses_with(result)
        graph.erase_node(gelu)
        graph.erase_node(linear)
    return bool(found)


def _linear_before(node: fx.Node) -> fx.Node | None:
    """The layer whose result goes into `node` alone, if `node` is GELU by tanh and both are ones that cuBLAS knows."""
    if node.target is not functional.gelu or node.kwargs != {"approximate": "tanh"} or len(node.args) != 1:
        return None
    linear = node.args[0]
    if linear.target is not functional.linear or linear.kwargs or len(linear.args) != 3 or set(linear.users) != {node}:
        return None
    tensors: list[Any] = [part.meta.get("example_value") if isinstance(part, fx.Node) else None for part in linear.args]
    if not all(isinstance(t, torch.Tensor) for t in tensors) or tensors[0].dim() < 2:
        return None
    x, weight, bias = tensors
    same = x.dtype in _DTYPES and x.dtype == weight.dtype == bias.dtype
    plain = type(x) is type(weight) is type(bias)  # not a quantised weight, which has its own product
    return linear if same and plain and weight.dim() == 2 and bias.dim() == 1 else None


def _size(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    size = x.meta["example_value"].shape[dim]
    return size if isinstance(size, int) else graph.call_function(aten.sym_size.int, (x, dim))
