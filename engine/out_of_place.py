"""Rewrite in-place sums of a block (`img += ...`) to return a new tensor, where gradients are wanted.

Autograd refuses a backward through a tensor that was written to after a norm or a product had saved it, and AOTAutograd traces
with autograd. In eager, gradient checkpointing hides the write from autograd's check: the host's Flux then trains with
gradients computed from the tensor as it was after the write.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .torch_compat import private

_OPERATORS: dict[Any, Callable] = {
    getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "truediv")
}
_METHODS = {"add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div}
# `__iadd__` and others: an `i` before the name of another operator; `__invert__` is none of these.
_IN_PLACE_METHODS = {"__setitem__"} | {n for n in dir(operator) if n[:3] == "__i" and hasattr(operator, f"__{n[3:]}")}
_IN_PLACE = {getattr(operator, name) for name in _IN_PLACE_METHODS}


def out_of_place(graph: fx.Graph) -> bool:
    """Replace in-place operations: later nodes that read the tensor get the new one. Returns whether the graph has changed."""
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
        nodes = list(graph.nodes)
        later = {*nodes[nodes.index(cast) + 1 :]}
        target.replace_all_uses_with(cast, delete_user_cb=lambda user, later=later: user in later)
        graph.erase_node(node)
        changed = True
    return changed


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a node of a Dynamo graph may write to: by the operator's schema; without a schema all operands, if a
    name, `out` or `inplace` shows that the node works in place."""
    schemas = [overload._schema for overload in overloads(node.target)]
    if not schemas:
        return node.all_input_nodes if _works_in_place(node) else []
    written = [
        node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for schema in schemas
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [operand for operand in private.pytree.tree_leaves(written) if isinstance(operand, fx.Node)]


def overloads(target: Any) -> list[Any]:
    """The overloads of an operator; none for any other function."""
    if isinstance(target, private.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, private.OpOverload) else []


def _works_in_place(node: fx.Node) -> bool:
    is_method = node.op == "call_method"
    name = str(node.target) if is_method else getattr(node.target, "__name__", "")
    in_name = name.endswith("_") and not (is_method and name.endswith("__"))
    in_name |= is_method and name in _IN_PLACE_METHODS
    return in_name or node.target in _IN_PLACE or "out" in node.kwargs or _is_told_to(node)


def _is_told_to(node: fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with `inplace=True`, which `torch.nn` may pass by position."""
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return bool({**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("inplace"))


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _may_be_replaced(graph: fx.Graph, target: fx.Node) -> bool:
    """Whether no other node has a view of the tensor's memory, and the tensor is an input or no view."""
    value = _value(target)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if target.op != "placeholder" and value._is_view():
        return False
    root = value._base if value._is_view() else value
    others = (_value(node) for node in graph.nodes)
    return not any(isinstance(v, torch.Tensor) and v is not value and v._is_view() and v._base is root for v in others)
