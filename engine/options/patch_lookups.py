"""Tell the entries that say where a block stands apart by use: those that only look up a replacement patch, and others.

The host's transformer blocks make a key of `block` and `block_index` and look it up in `patches_replace`
(ldm/modules/attention.py). Where there is no such patch, the result does not depend on them.
"""

from __future__ import annotations

import ast
import types

from .source import NoSource, source_of, text_of

PATCHES = ("patches", "patches_replace")


def read_elsewhere(code: types.CodeType, keys: set[str]) -> set[str]:
    """Those of `keys` that the function uses for more than to look up a patch, as far as its source tells; else all."""
    try:
        source = source_of(code)
    except NoSource:
        return keys
    return _Uses(source.tree, source.values).read(keys)


class _Uses:
    """Names count for the whole function, whatever the order of its statements.

    Args:
        values: what each variable is set to.
    """

    def __init__(self, tree: ast.FunctionDef, values: dict[str, list[ast.expr]]):
        self._tree, self._values = tree, values
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def read(self, keys: set[str]) -> set[str]:
        return {key for key in keys if not all(self._is_for_lookup(node, set()) for node in self._uses_of(key))}

    def _uses_of(self, key: str) -> list[ast.AST]:
        """The expressions that get it out of the options."""
        uses: list[ast.AST] = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Constant) and node.value == key:
                parent = self._parents[node]
                subscript = isinstance(parent, ast.Subscript) and parent.slice is node
                lookup = isinstance(parent, ast.Call) and _is_get(parent) and parent.args[0] is node
                uses.append(parent if subscript or lookup else node)
        return uses

    def _is_for_lookup(self, node: ast.AST, above: set[str]) -> bool:
        """Whether the value of an expression goes nowhere but into keys that are looked up among the patches.

        Args:
            above: variables that are being looked at.
        """
        if isinstance(node, ast.Constant):
            return False
        parent = self._parents[node]
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return True  # written
        if isinstance(parent, ast.Assign | ast.NamedExpr):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return all(isinstance(t, ast.Name) and self._variable_is_for_lookup(t.id, above) for t in targets) and (
                isinstance(parent, ast.Assign) or self._is_for_lookup(parent, above)
            )
        if isinstance(parent, ast.Tuple | ast.IfExp) and node is not getattr(parent, "test", None):
            return self._is_for_lookup(parent, above)
        if isinstance(parent, ast.Subscript):
            if parent.value is node:  # a part of it
                return isinstance(parent.slice, ast.Constant) and self._is_for_lookup(parent, above)
            return self._are_patches(parent.value, set())
        if isinstance(parent, ast.Compare):
            others = [other for other in (parent.left, *parent.comparators) if other is not node]
            if all(isinstance(op, ast.Is | ast.IsNot) for op in parent.ops):
                return all(isinstance(other, ast.Constant) and other.value is None for other in others)
            is_lookup = all(isinstance(op, ast.In | ast.NotIn) for op in parent.ops) and parent.left is node
            return is_lookup and all(self._are_patches(other, set()) for other in others)
        if isinstance(parent, ast.Call):
            return _is_get(parent) and parent.args[0] is node and self._are_patches(parent.func.value, set())  # type: ignore[attr-defined]
        return False

    def _variable_is_for_lookup(self, name: str, above: set[str]) -> bool:
        if name in above:
            return True
        uses = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return all(self._is_for_lookup(use, above | {name}) for use in uses)

    def _are_patches(self, node: ast.expr, above: set[str]) -> bool:
        """Whether an expression can be nothing but what is under PATCHES in the options, or a part of that."""
        if isinstance(node, ast.Name):
            values = self._values.get(node.id, [])
            inside = above | {node.id}
            return node.id in above or (bool(values) and all(_is_empty(v) or self._are_patches(v, inside) for v in values))
        if isinstance(node, ast.Subscript):
            return text_of(node.slice) in PATCHES or self._are_patches(node.value, above)
        if isinstance(node, ast.Call) and _is_get(node):
            return text_of(node.args[0]) in PATCHES or self._are_patches(node.func.value, above)  # type: ignore[attr-defined]
        return False


def _is_get(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "get" and bool(call.args)


def _is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Dict) and not node.keys
