"""The syntax tree of a function that is loaded, if its source is there and still the same."""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class NoSource(Exception):
    """There is none, or it is not what the function was made from; says which."""


@dataclass
class Source:
    """A function's definition.

    In the branches of `if name == "text":` and `if isinstance(name, C):` nodes have notes: a subscript `[name]` is written as
    `["text"]`, a `name` has the nodes of its classes as `only`, of those that it is none of as `never`.

    Args:
        tree: without what decorates it.
        inner: functions written inside, by name.
        odd: variables that may be anything: parameters of inner functions, what is imported or caught inside.
        values: what each variable is set to; `ast.Starred` for that of which it gets the elements.
        steps: the nodes that set variables or call something.
    """

    tree: ast.FunctionDef
    inner: dict[str, ast.FunctionDef]
    odd: set[str]
    values: dict[str, list[ast.expr]]
    steps: list[ast.AST]


_sources: weakref.WeakKeyDictionary[types.CodeType, Source] = weakref.WeakKeyDictionary()


def source_of(code: types.CodeType) -> Source:
    """Raises NoSource."""
    if code not in _sources:
        tree = _parse(code)
        inner = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n is not tree}
        own = {id(node) for node in ast.walk(tree.args)}
        odd = {name for node in ast.walk(tree) if id(node) not in own and (name := _odd_name(node))}
        _sources[code] = source = Source(tree, inner, odd, {}, [])
        for node in ast.walk(tree):
            found = list(assignments(node))
            for target, value in found:
                for name in names_in(target):
                    source.values.setdefault(name, []).append(value)
            if found or isinstance(node, ast.Call):
                source.steps.append(node)
    return _sources[code]


def _odd_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.alias):
        return (node.asname or node.name).partition(".")[0]
    if isinstance(node, ast.arg):
        return node.arg
    return (
        getattr(node, "name", None)
        if isinstance(node, ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar)
        else None
    )


def _parse(code: types.CodeType) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError, IndexError, TypeError) as error:  # also a lambda in the middle of a line
        raise NoSource(f"its source cannot be read ({type(error).__name__})") from None
    if not isinstance(tree, ast.FunctionDef):
        raise NoSource("it is no function that stands by itself")
    tree.decorator_list = []
    compiled = compile(ast.Module([tree], []), code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    own = [c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name]
    if not own or _words(own[0]) != _words(code):  # a file may have been updated since
        raise NoSource("its source is another one")
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            _note(node)
    return tree


def _words(code: types.CodeType) -> set[str]:
    """The names and constants in it: compiled without its class it has them all, if in other places and otherwise indented."""
    words = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            words |= _words(const)
        else:
            words.add(" ".join(repr(const).replace(r"\n", " ").split()))
    return words - {"__class__"}


def _note(branch: ast.If) -> None:
    test = branch.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        variable, text = test.left, test.comparators[0]
        if isinstance(variable, ast.Name) and isinstance(text, ast.Constant):
            for node in _unchanged(branch.body, variable.id):
                if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and node.slice.id == variable.id:
                    node.slice = text
    elif (
        isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance" and len(test.args) == 2
    ):
        variable, classes = test.args
        if isinstance(variable, ast.Name):
            for statements, note in ((branch.body, "only"), (branch.orelse, "never")):
                for node in _unchanged(statements, variable.id):
                    if isinstance(node, ast.Name) and node.id == variable.id:
                        setattr(node, note, [*getattr(node, note, ()), classes])


def _unchanged(statements: list[ast.stmt], name: str) -> list[ast.AST]:
    """The nodes of a branch; none if it sets the variable itself."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    sets = any(isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load) for node in nodes)
    return [] if sets else nodes


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of what a node binds; values of which the target gets one after the other are `ast.Starred`."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, ast.Starred(node.iter)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def names_in(target: ast.expr) -> list[str]:
    """The variables that a target sets."""
    return [n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def text_of(node: ast.expr) -> str | None:
    """A literal text."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def filtered_copy(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """(options, names) of `{k: v for k, v in options.items() if k in names}`; None for anything else."""
    if not isinstance(node, ast.DictComp) or len(node.generators) != 1 or len(node.generators[0].ifs) != 1:
        return None
    loop, chosen = node.generators[0], node.generators[0].ifs[0]
    if not isinstance(loop.iter, ast.Call) or not isinstance(loop.iter.func, ast.Attribute) or loop.iter.func.attr != "items":
        return None
    if not isinstance(chosen, ast.Compare) or len(chosen.ops) != 1 or not isinstance(chosen.ops[0], ast.In):
        return None
    pair = ast.unparse(ast.Tuple([node.key, node.value]))
    if ast.unparse(loop.target) != pair or ast.unparse(chosen.left) != ast.unparse(node.key):
        return None
    return loop.iter.func.value, chosen.comparators[0]
