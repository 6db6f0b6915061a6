"""Queries, keys and values of attention in the order in which they lie in memory: all heads of a token, then the next token.

Many models view them as `[batch, heads, tokens, channels]` before they norm and rotate them. Computed in that order, heads
first, each kernel reads the rotations of all tokens anew for each head, and attention returns its output in the same order,
which must be copied before the next layer. Seen as `[batch, tokens, heads, channels]` neighbouring rows share a rotation.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

_ATTENTION = functional.scaled_dot_product_attention
_NORMS = (torch.rms_norm, functional.rms_norm)


def heads_of_a_token_together(graph: fx.Graph) -> bool:
    """Turn what leads to an attention's inputs where it starts as a view of tokens.

    Args:
        graph: as Dynamo has traced it; changed in place. Values stay the same, the strides of attention's inputs change.

    Returns:
        Whether it was changed.
    """
    changed = False
    for attention in [node for node in graph.nodes if node.op == "call_function" and node.target is _ATTENTION]:
        for tensor in dict.fromkeys(node for node in attention.args[:3] if isinstance(node, fx.Node)):
            if _is_view_of_tokens(tensor) or not _can_turn(tensor):
                continue
            turned = _turned(graph, tensor)
            with graph.inserting_before(attention):
                back = _exchanged(graph, turned)
            attention.replace_input_with(tensor, back)
            _erase_unused(graph, tensor)
            changed = True
    return changed


def _value(node: object) -> torch.Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _is_view_of_tokens(node: object) -> bool:
    """`[batch, heads, tokens, channels]` of which the heads of a token lie together."""
    tensor = _value(node)
    return (
        tensor is not None
        and tensor.dim() == 4
        and statically_known_true(tensor.stride(3) == 1)
        and statically_known_true(tensor.stride(1) < tensor.stride(2))
    )


def _operators() -> tuple[object, ...]:
    """The host's rotary embeddings of one tensor and of two."""
    return tuple(getattr(torch.ops.comfy_kitchen, name, None) for name in ("apply_rope1", "apply_rope"))


def _rotation(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The tensor and the rotations of which `node` is the product."""
    one, both = _operators()
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is one and one is not None and len(node.args) == 2:
        return node.args
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[1] in (0, 1):
        pair = node.args[0]
        if pair.target is both and both is not None and len(pair.args) == 3 and not pair.kwargs:
            return pair.args[node.args[1]], pair.args[2]
    return None


def _sources(node: fx.Node) -> list[fx.Node]:
    """What `node` is made of, if it is made token by token and head by head; else nothing."""
    rotation = _rotation(node)
    if rotation is not None:
        return [rotation[0]] if _of_all_heads(*rotation) else []
    if node.op == "call_method" and node.target == "to":
        plain = "memory_format" not in node.kwargs and _value(node.args[0]) is not None
        return [node.args[0]] if plain else []
    if node.op != "call_function":
        return []
    if node.target in _NORMS:
        shape = node.args[1] if len(node.args) > 1 else None
        return [node.args[0]] if isinstance(shape, (list, tuple)) and len(shape) == 1 else []
    if node.target is torch.cat and node.args:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return list(node.args[0]) if dim == 2 and isinstance(node.args[0], (list, tuple)) else []
    return []


def _of_all_heads(tensor: fx.Node, rotations: fx.Node) -> bool:
    """Whether there is a rotation a token, the same for all heads."""
    narrowed = rotations.target is torch.narrow and _value(rotations) is None  # by `rotate_before_joining`, to these tokens
    table, value = _value(rotations.args[0] if narrowed else rotations), _value(tensor)
    if table is None or table.dim() != 6 or not statically_known_true(table.shape[1] == 1):
        return False
    if narrowed:
        return rotations.args[1] == 2
    return value is not None and statically_known_true(table.shape[2] == value.shape[2])


def _can_turn(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if _is_view_of_tokens(node):
        return True
    sources = _sources(node)
    return bool(sources) and len(node.users) == 1 and all(map(_can_turn, sources))


def _exchanged(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Tokens and heads exchanged; as a function, since PyTorch caches no graph that has methods of unknown tensors."""
    return graph.call_function(torch.transpose, (node, 1, 2))


def _turned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The same with tokens and heads exchanged, made where `node` is made."""
    if _is_view_of_tokens(node):
        with graph.inserting_after(node):
            return _exchanged(graph, node)
    turned = [_turned(graph, source) for source in _sources(node)]
    rotation = _rotation(node)
    with graph.inserting_before(node):
        if rotation is not None:
            return graph.call_function(_operators()[0], (turned[0], _exchanged(graph, rotation[1])))
        if node.target is torch.cat:
            return graph.call_function(torch.cat, (turned, 1))
        if node.op == "call_method":
            source = _sources(node)[0]
            turned[0].meta["example_value"] = source.meta["example_value"].transpose(1, 2)
        return graph.create_node(node.op, node.target, (turned[0], *node.args[1:]), dict(node.kwargs))


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Of the chain that was turned; nothing in it has an effect."""
    if node.users or _is_view_of_tokens(node):
        return
    before = [node.args[0]] if node.target is operator.getitem else _sources(node) or [node.args[0], node.args[1]]
    graph.erase_node(node)
    for source in before:
        _erase_unused(graph, source)
