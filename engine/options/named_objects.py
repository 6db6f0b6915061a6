"""What an expression in a loaded function may stand for, found without running it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .source import Source, text_of

_PASSING_ON = (enumerate, zip, reversed, list, tuple, iter, sorted)
_CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OF_CONTAINERS = ("get", "items", "values", "pop")
_EXECUTOR = ("comfy.patcher_extension", "WrapperExecutor")


class Unknown(Exception):
    """An expression may stand for anything; says which."""


class Objects:
    """Looks at the names of one function, whatever the order of its statements.

    Args:
        source: its definition.
        given: what its parameters may be, those of which it is known.
        from_options: says of a subscript or a lookup whether it gets something out of the options, and if so whether nothing
            but patches can come of it.
    """

    def __init__(
        self,
        function: types.FunctionType,
        source: Source,
        given: dict[str, list],
        from_options: Callable[[ast.expr], bool | None],
    ):
        self._function, self._given, self._from_options = function, given, from_options
        self.inner, self.values = source.inner, source.values
        self._odd = source.odd
        self._locals = set(_locals(function.__code__))
        self._looking: set[str] = set()

    def of(self, node: ast.expr) -> list:
        """All the objects that it may stand for.

        Raises:
            Unknown
        """
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.Name):
            found = self._of_name(node.id)
            for classes in getattr(node, "only", ()):
                found = [o for o in found if isinstance(o, self._classes(classes))]
            for classes in getattr(node, "never", ()):
                found = [o for o in found if not isinstance(o, self._classes(classes))]
            return found
        if isinstance(node, ast.Attribute):
            return [found for owner in self.of(node.value) for found in _attribute(owner, node.attr)]
        if isinstance(node, ast.Subscript):
            return self._of_lookup(node, node.value)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Starred):
            return elements(self.of(node.value))
        if isinstance(node, ast.NamedExpr):
            return self.of(node.value)
        if isinstance(node, ast.Lambda):
            return [node]
        parts = {ast.IfExp: ("body", "orelse"), ast.BoolOp: ("values",), ast.Dict: ("values",)}.get(type(node), ("elts",))
        if not all(hasattr(node, part) for part in parts):
            raise Unknown(ast.unparse(node)[:60])
        found = [getattr(node, part) for part in parts]
        objects = [o for part in found for item in (part if isinstance(part, list) else [part]) for o in self.of(item)]
        return objects if isinstance(node, ast.IfExp | ast.BoolOp) else [_Display(objects)]

    def _classes(self, node: ast.expr) -> tuple[type, ...]:
        return tuple(found for found in elements(self.of(node)) if isinstance(found, type))

    def _of_name(self, name: str) -> list:
        if name in self._looking:
            return []
        if name in self._odd:
            raise Unknown(name)
        if name in self.values or name in self._given or name in self.inner:
            self._looking.add(name)
            try:
                found = [o for value in self.values.get(name, ()) for o in self.of(value)]
            finally:
                self._looking.remove(name)
            if name in _parameters(self._function.__code__) and name not in self._given:
                raise Unknown(name)
            return found + self._given.get(name, []) + ([self.inner[name]] if name in self.inner else [])
        return [self.named(name)]

    def _of_lookup(self, node: ast.expr, container: ast.expr) -> list:
        patches = self._from_options(node)
        if patches is None:
            return elements(self.of(container))
        if not patches:
            raise Unknown(ast.unparse(node)[:60])
        return []

    def _of_call(self, node: ast.Call) -> list:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _OF_CONTAINERS:
            found = self._of_lookup(node, function.value)
            return found + [o for default in node.args[1:] for o in self.of(default)]
        if self.is_builtin(function, super) and not node.args:
            owners = self._given.get(next(iter(_parameters(self._function.__code__)), ""), [])
            return [super(self.named("__class__"), owner) for owner in owners]
        if self.is_builtin(function, *_PASSING_ON):
            return [o for argument in node.args for o in self.of(argument)]
        if self.is_builtin(function, getattr) and len(node.args) > 1 and (name := text_of(node.args[1])) is not None:
            found = [o for owner in self.of(node.args[0]) for o in _attribute(owner, name)]
            return found + [o for default in node.args[2:] for o in self.of(default)]
        found = self.of(function)
        if found and all(_is_executor(target) for target in found):
            return [_Executor(self.of(node.args[0]))]
        if found:
            raise Unknown(ast.unparse(node)[:60])
        return []

    def is_builtin(self, node: ast.expr, *values: Any) -> bool:
        """Whether it is a name that stands for one of these built-in objects."""
        if not isinstance(node, ast.Name) or not any(node.id == value.__name__ for value in values):
            return False
        return node.id not in self.values and node.id not in self.inner and self.named(node.id) in values

    def named(self, name: str) -> object:
        """What a name stands for that the function does not set.

        Raises:
            Unknown
        """
        function = self._function
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            try:
                return cell.cell_contents
            except ValueError:
                raise Unknown(f"{name}, which is not set") from None
        if name not in self._locals and name in function.__globals__:
            return function.__globals__[name]
        if name not in self._locals and hasattr(builtins, name):
            return getattr(builtins, name)
        raise Unknown(name)


class _Display(list):
    """A list, tuple, set or dict that the function makes itself: its methods keep what they are given."""


class _Executor:
    """The host's call of a function through the wrappers in the options, which are looked at apart."""

    def __init__(self, execute: list):
        self.execute = execute


def _is_executor(target: object) -> bool:
    owner = getattr(target, "__self__", None)
    return isinstance(owner, type) and (owner.__module__, owner.__name__) == _EXECUTOR


def _is_shared(value: object) -> bool:
    """Whether an attribute is the host's or PyTorch's, or no code; the next block of this class may have another one."""
    if isinstance(value, list | tuple | dict):
        return all(map(_is_shared, value.values() if isinstance(value, dict) else value))
    named = value if isinstance(value, types.FunctionType | type) else type(value)
    return (named.__module__ or "").partition(".")[0] in ("comfy", "torch", "builtins")


def _attribute(owner: object, name: str) -> list:
    if owner is None:
        return []
    if isinstance(owner, _Executor):
        return owner.execute if name == "execute" else []
    if isinstance(owner, nn.Module) and name in owner._modules:
        return [owner._modules[name]]
    if isinstance(owner, nn.Module) and not _is_shared(owner.__dict__.get(name)):
        raise Unknown(f"the attribute {name}")
    static = inspect.getattr_static(type(owner), name, None)
    if isinstance(owner, _Display) or isinstance(static, property | functools.cached_property):
        raise Unknown(f"the attribute {name}")
    try:
        return [getattr(owner, name)]
    except AttributeError:
        raise Unknown(f"the attribute {name}, which is not set") from None


def elements(objects: list) -> list:
    """The objects, and what is in the containers among them."""
    found = []
    for one in objects:
        found.append(one)
        if isinstance(one, dict | nn.ModuleDict):
            found += elements(list(one.values()))
        elif isinstance(one, _CONTAINERS):
            found += elements(list(one))
    return found


def callee(target: object) -> tuple[object, int, object, dict[str, list]]:
    """What runs when `target` is called: (function, parameters that are bound, the first of them, others by name)."""
    if isinstance(target, functools.partial):
        function, bound, owner, known = callee(target.func)
        return function, bound + len(target.args), owner, {**known, **{k: [v] for k, v in target.keywords.items()}}
    if isinstance(target, types.MethodType):
        return target.__func__, 1, target.__self__, {}
    if isinstance(target, nn.Module):
        own = target.__dict__.get("forward")
        if type(target).__call__ is not nn.Module.__call__:
            return type(target).__call__, 1, target, {}
        return callee(own) if own is not None else (type(target).forward, 1, target, {})
    if isinstance(target, types.FunctionType | ast.FunctionDef | ast.Lambda | type):
        return target, 0, None, {}
    call = getattr(type(target), "__call__", None)  # noqa: B004  the one that a call uses
    return (call, 1, target, {}) if isinstance(call, types.FunctionType) else (target, 0, None, {})


def arguments_of(code: types.CodeType) -> list[str]:
    """The names of its parameters without `*args` and `**kwargs`."""
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def rest_of(code: types.CodeType) -> tuple[str | None, str | None]:
    """The names of its `*args` and its `**kwargs`."""
    names = iter(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    args, kwargs = (next(names) if code.co_flags & flag else None for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return args, kwargs


def _parameters(code: types.CodeType) -> list[str]:
    return [*arguments_of(code), *filter(None, rest_of(code))]


def _locals(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_varnames, *code.co_cellvars)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _locals(const)
