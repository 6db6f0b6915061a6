"""Sums that a block writes into a tensor (`img += ...`), written into a new one where gradients are wanted.

Autograd refuses to go back through a tensor that was written into after a norm or a product had kept it, and AOTAutograd traces
with autograd. In eager, gradient checkpointing hides that from autograd's check: the host's Flux then trains with gradients of
the tensor as it was afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .torch_compat import private

_OPERATORS: dict[Any, Callable] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = {"add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div}


def out_of_place(graph: fx.Graph) -> bool:
    """Give the result of such an operation to all that read the tensor after it; the block's caller keeps it as it was.

    Args:
        graph: as Dynamo has traced it; changed in place.

    Returns:
        Whether it was changed.
    """
    changed = False
    for node in list(graph.nodes):
        function = _OPERATORS.get(node.target) if node.op == "call_function" else _METHODS.get(node.target)
        target = node.args[0] if node.args else None
        if function is None or not isinstance(target, fx.Node) or not _may_be_replaced(graph, target):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(function, node.args, node.kwargs)
            cast = graph.call_method("to", (new, _value(target).dtype))
        new.meta = cast.meta = {**node.meta, "example_value": _value(target).clone()}
        node.replace_all_uses_with(cast)
        later = _nodes_behind(cast)
        target.replace_all_uses_with(cast, delete_user_cb=lambda user, later=later: user in later)
        graph.erase_node(node)
        changed = True
    return changed


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether something in a graph of Dynamo's writes into a tensor that may be an input."""
    return any(
        (node.op == "call_function" and (node.target in _OPERATORS or node.target is operator.setitem))
        or (node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"))
        or (isinstance(node.target, private.OpOverload) and node.target._schema.is_mutable)
        or "out" in node.kwargs
        or getattr(node.target, "__name__", "").endswith("_")
        for node in graph.nodes
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _may_be_replaced(graph: fx.Graph, target: fx.Node) -> bool:
    """Whether nobody sees the tensor's memory but by its name: it is no view, unless of an input, and has none."""
    value = _value(target)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if target.op != "placeholder" and value._is_view():
        return False
    root = value._base if value._is_view() else value
    others = (_value(node) for node in graph.nodes)
    return not any(isinstance(v, torch.Tensor) and v is not value and v._is_view() and v._base is root for v in others)


def _nodes_behind(node: fx.Node) -> set[fx.Node]:
    found = set()
    while node.op != "root":
        node = node.next
        found.add(node)
    return found
