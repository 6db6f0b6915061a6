"""How one function uses the dict of options that it is given; see `options/call_flow.py`.

Names count for the whole function, whatever the order of its statements.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.utils.checkpoint import checkpoint

from .named_objects import Objects, Unknown, arguments_of, callee, elements, rest_of
from .patches import OVERRIDE
from .source import assignments, filtered_copy, names_in, source_of, text_of

BY_NAME = ("transformer_options", "extra_options")
# Hold patches, and nothing else that can be called.
_PATCHES = ("patches", "patches_replace", OVERRIDE)
# What may be in a variable beside what is called.
_NOT_CALLED = (types.NoneType, list, tuple, dict, nn.ModuleList, nn.ModuleDict)
_LOOKUPS = ("get", "pop", "setdefault")


class Lost(Exception):
    """The dict may be read by code that nobody has looked at; says where."""


class Callees(Protocol):
    """Follows the dict into other functions.

    Args:
        names: parameters that its entries become (`**options`).
    """

    names: set[str]

    def enter(self, function: types.FunctionType, given: dict[str, list], holding: Iterable[str | None]) -> bool: ...


class Uses:
    """One function, those written inside it included."""

    def __init__(self, flow: Callees, function: types.FunctionType, given: dict[str, list], holding: frozenset[str]):
        self._flow, self._function = flow, function
        source = source_of(function.__code__)
        self._tree, self._steps = source.tree, source.steps
        self._holding = set(holding)
        self._holding.update(n.arg for n in ast.walk(self._tree) if isinstance(n, ast.arg) and n.arg in BY_NAME)
        self._returns = False
        self._keys: set[str] = set()  # variables of loops over the dict
        self._methods: set[ast.Attribute] = set()  # that look something up in it, or copy it
        self._objects = Objects(function, source, given, self._from_options)

    def look(self) -> bool:
        before = -1
        while before != len(self._holding):
            before = len(self._holding)
            for node in self._steps:
                self._spread(node)
        for statement in self._tree.body:
            self._check(statement, self._tree)
        return self._returns

    def _lost(self, node: ast.AST, why: str) -> Lost:
        return Lost(f"{self._function.__qualname__}, line {getattr(node, 'lineno', 0)} of it: {why}")

    def _spread(self, node: ast.AST) -> None:
        """Which variables hold the dict after this."""
        for target, value in assignments(node):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                pairs = list(zip(target.elts, value.elts, strict=True))
            else:
                pairs = [(target, value)]
            for part, of in pairs:
                if not self._holds(of):
                    continue
                if isinstance(node, ast.For):
                    if not isinstance(part, ast.Name):
                        raise self._lost(node, "a loop over it")
                    self._keys.add(part.id)
                elif isinstance(part, ast.Subscript):
                    if text_of(part.slice) not in BY_NAME and not self._is_key(part.slice):
                        raise self._lost(node, "it is stored")
                    self._holding.add(self._own_dict(part.value))
                elif isinstance(part, ast.Name | ast.Tuple):
                    self._holding.update(names_in(part))
                else:
                    raise self._lost(node, "it is stored")
        if isinstance(node, ast.Call):
            self._holds(node)

    def _is_key(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._keys

    def _holds(self, node: ast.expr | None) -> bool:
        """Whether the value is the dict, a copy of it, or something that it is in."""
        if isinstance(node, ast.Name):
            return node.id in self._holding
        if isinstance(node, ast.NamedExpr | ast.Starred):
            return self._holds(node.value)
        if isinstance(node, ast.IfExp):
            return self._holds(node.body) or self._holds(node.orelse)
        if isinstance(node, ast.BoolOp | ast.Dict):
            return any(map(self._holds, node.values))
        if isinstance(node, ast.Tuple | ast.List):
            return any(map(self._holds, node.elts))
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.BitOr) and (self._holds(node.left) or self._holds(node.right))
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return key in BY_NAME or (self._holds(node.value) and (isinstance(key, int) or self._is_key(node.slice)))
        if isinstance(node, ast.DictComp):
            kept = self._kept(node)
            return kept is not None and not kept.isdisjoint(BY_NAME)
        return isinstance(node, ast.Call) and self._result_holds(node)

    def _kept(self, node: ast.AST) -> set[str] | None:
        """The keys of a copy of some of its entries; None for anything else."""
        options, names = filtered_copy(node) or (None, None)
        if isinstance(names, ast.Name) and len(self._objects.values.get(names.id, ())) == 1:
            names = self._objects.values[names.id][0]
        if options is None or not self._holds(options) or not isinstance(names, ast.Tuple | ast.List | ast.Set):
            return None
        texts = [text_of(name) for name in names.elts]
        self._flow.names.update(filter(None, texts))
        kept = {text for text in texts if text is not None}
        return None if None in texts else kept

    def _result_holds(self, call: ast.Call) -> bool:
        method = call.func
        given = any(map(self._holds, [*call.args, *(k.value for k in call.keywords)]))
        if isinstance(method, ast.Attribute):
            if method.attr in _LOOKUPS and call.args and (self._holds(method.value) or not given):
                return given or text_of(call.args[0]) in BY_NAME
            if self._holds(method.value):
                return method.attr == "copy"
            if method.attr == "update" and isinstance(method.value, ast.Name) and given:
                self._holding.add(self._own_dict(method.value))
                return False
        if not given:
            return False
        if self._objects.is_builtin(method, dict):
            return True
        return not self._objects.is_builtin(method, isinstance) and self._call(call)

    def _own_dict(self, node: ast.expr) -> str:
        """The name of a dict that this function has made: nobody else sees what is put into it."""
        if isinstance(node, ast.Name):
            made = [isinstance(v, ast.Dict) or self._holds(v) for v in self._objects.values.get(node.id, ())]
            if all(made) and (made or node.id == rest_of(self._function.__code__)[1] or node.id in self._holding):
                return node.id
        raise self._lost(node, "it is stored")

    def _is_checkpoint(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "checkpoint" and checkpoint in self._objects.of(node)

    def _check(self, node: ast.AST, parent: ast.AST) -> None:
        """Raise Lost where the dict is used in a way that is not understood."""
        if self._kept(node) is not None:
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            literal = bool(node.args) and text_of(node.args[0]) is not None
            if node.func.attr in ("copy", "update") or (node.func.attr in _LOOKUPS and literal):
                self._methods.add(node.func)
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            if self._holds(node) and not self._is_understood(node, parent):
                raise self._lost(node, f"`{ast.unparse(parent)[:60]}`")
            if self._is_key(node) and not isinstance(parent, ast.Subscript):
                others = [parent.left, *parent.comparators] if isinstance(parent, ast.Compare) else [None]
                if not all(other is node or isinstance(other, ast.Constant) for other in others):
                    raise self._lost(node, "a key of it is used")
        if isinstance(node, ast.Global | ast.Nonlocal) and self._holding.intersection(node.names):
            raise self._lost(node, "it is stored")
        for child in ast.iter_child_nodes(node):
            self._check(child, node)

    def _is_understood(self, node: ast.expr, parent: ast.AST) -> bool:
        if isinstance(parent, ast.Return):
            self._returns = True
            return not any(parent in ast.walk(inner) for inner in self._objects.inner.values())
        if isinstance(node, ast.Subscript) and self._is_key(node.slice):
            return isinstance(parent, ast.Assign) and all(isinstance(t, ast.Subscript) for t in parent.targets)
        if isinstance(parent, ast.Subscript):
            stored = isinstance(parent.ctx, ast.Store | ast.Del)
            return parent.value is node and (stored or isinstance(parent.slice, ast.Constant) or self._is_key(parent.slice))
        if isinstance(parent, ast.Compare):
            others = [other for other in (parent.left, *parent.comparators) if other is not node]
            plain = all(isinstance(other, ast.Constant) for other in others)
            return plain and all(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in parent.ops)
        if isinstance(parent, ast.Attribute):
            return parent in self._methods
        if isinstance(parent, ast.Dict):
            return all(
                key is None or text_of(key) in BY_NAME
                for key, value in zip(parent.keys, parent.values, strict=True)
                if value is node
            )
        if isinstance(parent, ast.Call):
            method = parent.func.attr if isinstance(parent.func, ast.Attribute) else None
            return node is not parent.args[0] if method in _LOOKUPS else True  # other calls: see `_call`
        if isinstance(parent, ast.BinOp | ast.UnaryOp):
            return isinstance(parent.op, ast.BitOr | ast.Not)
        kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Expr, ast.For, ast.If, ast.IfExp, ast.BoolOp)
        return isinstance(parent, (*kinds, ast.keyword, ast.Starred, ast.Tuple, ast.List))

    def _call(self, call: ast.Call) -> bool:
        """Follow the dict into what is called; whether it comes back."""
        if self._is_checkpoint(call.func):  # runs its first argument with the others
            return self._call(ast.Call(call.args[0], call.args[1:], call.keywords, lineno=call.lineno))
        groups: dict[tuple, tuple[dict, list]] = {}
        for target in elements(self._objects.of(call.func)):
            function, bound, owner, known = callee(target)
            if isinstance(target, _NOT_CALLED):
                continue
            if isinstance(function, ast.FunctionDef | ast.Lambda):  # inside this one: its variables are ours
                inner = function.args
                by_place = [argument.arg for argument in (*inner.posonlyargs, *inner.args)]
                by_name = [*by_place, *(argument.arg for argument in inner.kwonlyargs)]
                rest = inner.vararg.arg if inner.vararg else None, inner.kwarg.arg if inner.kwarg else None
                self._holding |= self._bind(call, by_place, by_name, rest, 0)[0]
            elif isinstance(function, types.FunctionType):
                groups.setdefault((function, bound), (known, []))[1].append(owner)
            else:
                raise self._lost(call, f"`{ast.unparse(call.func)[:60]}` is a {type(target).__name__}")
        back = False
        for (function, bound), (known, owners) in groups.items():
            code = function.__code__
            arguments = arguments_of(code)
            holding, given = self._bind(call, arguments[: code.co_argcount], arguments, rest_of(code), bound)
            if bound:
                given[arguments[0]] = owners
            back |= self._flow.enter(function, {**given, **known}, holding)
        return back

    def _bind(
        self, call: ast.Call, by_place: list[str], by_name: list[str], rest: tuple[str | None, str | None], bound: int
    ) -> tuple[set[str], dict[str, list]]:
        """The parameters that hold the dict in this call, and what others may be."""
        holding: set[str] = set()
        passed: list[tuple[str, ast.expr]] = []
        starred = False
        for at, value in enumerate(call.args, bound):
            starred |= isinstance(value, ast.Starred)
            if not starred and at < len(by_place):
                passed.append((by_place[at], value))
            elif not starred and rest[0] is None:
                return set(), {}  # an error when it runs
            elif self._holds(value):
                raise self._lost(call, "it is one of many arguments")
        for keyword in call.keywords:
            if keyword.arg in by_name:
                passed.append((keyword.arg, keyword.value))
            elif self._holds(keyword.value):
                if keyword.arg is None:
                    holding.update(name for name in by_name if name in BY_NAME)
                    self._flow.names.update(by_name)
                elif keyword.arg not in BY_NAME:
                    raise self._lost(call, f"it is passed as {keyword.arg}")
                if rest[1]:
                    holding.add(rest[1])
        given = {}
        for name, value in passed:
            if self._holds(value):
                holding.add(name)
                continue
            try:
                given[name] = self._objects.of(value)
            except Unknown:
                continue
        return holding, given

    def _from_options(self, node: Any) -> bool | None:
        """Of a lookup in the dict, as `d[k]` or `d.get(k)`: whether what it finds are patches. None for another lookup."""
        if isinstance(node, ast.Subscript):
            container, key = node.value, node.slice
        else:
            container, key = node.func.value, node.args[0] if node.args else node
        return text_of(key) in _PATCHES if self._holds(container) else None
