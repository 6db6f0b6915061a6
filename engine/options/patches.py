"""Tell which entries of `transformer_options` the code of a patch reads, and whether a function argument changes an object.

The answer is exact, or None ("may read anything") unless each use of the dict is a lookup with a literal key: where the dict is
passed on, looped over or captured, and for code that is no plain Python function.
"""

import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..forwards import contents_of

OVERRIDE = "optimized_attention_override"
# Which argument the host passes the dict in (ldm/modules/attention.py); ldm/flux/layers.py passes it as `extra_options`.
_ARGUMENT = {
    "attn1_patch": 3, "attn2_patch": 3, "attn1_output_patch": 1, "attn2_output_patch": 1, "middle_patch": 1,
    "attn1": 3, "attn2": 3,
}  # fmt: skip
BY_NAME = ("extra_options", "transformer_options")
FRAMES = {"locals", "vars", "eval", "exec", "_getframe", "currentframe"}

_keys_by_function: weakref.WeakKeyDictionary[types.FunctionType, dict[str, frozenset[str] | None]] = weakref.WeakKeyDictionary()


def keys_of_patch(name: str, patch: object) -> frozenset[str] | None:
    """The literal keys that `patch`, registered under `name`, looks up; None when that cannot be told."""
    bound = 0
    function: object = patch
    if not isinstance(patch, types.FunctionType | types.MethodType):
        function = getattr(type(patch), "__call__", None)  # noqa: B004  the one that a call uses
        bound = 1
    elif isinstance(patch, types.MethodType):
        function, bound = patch.__func__, 1
    if not isinstance(function, types.FunctionType) or (function.__module__ or "").partition(".")[0] == "torch":
        return None
    keys = _keys_by_function.setdefault(function, {})
    if name not in keys:
        if name == OVERRIDE:
            keys[name] = frozenset() if _reads_no_options(function, set()) else None
        else:
            keys[name] = _keys_of_function(function, name, bound)
    return keys[name]


def _keys_of_function(function: types.FunctionType, name: str, bound: int) -> frozenset[str] | None:
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    required = code.co_argcount - len(function.__defaults__ or ()) - bound
    # ldm/wan/model.py passes a patch one dict of arguments, which holds the options.
    if name not in _ARGUMENT or required < 2 or "transformer_options" in code.co_consts:
        return None
    candidates = {a for a in arguments if a in BY_NAME}
    if code.co_flags & inspect.CO_VARKEYWORDS and not candidates:
        return None
    at = _ARGUMENT[name] + bound
    if at < code.co_argcount:
        candidates.add(code.co_varnames[at])
    return _lookups(code, candidates) if candidates else None


def _reads_no_options(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
    """Whether an attention override never touches the dict, which the host passes as the keyword `transformer_options`.

    Nor may it change an object of its module. It often hands its `**kwargs` on to a kernel; that is looked through as well.
    """
    code = function.__code__
    if code in seen:
        return True
    seen.add(code)
    mentioned = {*code.co_varnames, *code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    host = function.__globals__.get("__name__", "").partition(".")[0] in ("comfy", "torch")
    nested = any(isinstance(c, types.CodeType) for c in code.co_consts)
    if not host and (nested or mentioned.intersection((*BY_NAME, *FRAMES)) or _changes_module(function)):
        return False
    forwards = any(i.opname.startswith("CALL_FUNCTION_EX") for i in dis.get_instructions(code))
    if not host and forwards:
        attributes = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        if attributes - {"__wrapped__"}:
            return False
    used = [getattr(function, "__wrapped__", None)]
    used += contents_of(function)
    if not host:
        used += [function.__globals__.get(name) for name in code.co_names]
    for target in used:
        if isinstance(target, types.FunctionType):
            if not _reads_no_options(target, seen):
                return False
        elif forwards and callable(target) and not isinstance(target, type | types.BuiltinFunctionType):
            return False
    return True


def _lookups(code: types.CodeType, names: set[str]) -> frozenset[str] | None:
    """The literal keys looked up in the variables `names`; None when one of them is used in another way."""
    if names.intersection(code.co_cellvars) or FRAMES.intersection(code.co_names):
        return None
    keys = set()
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("PUSH_NULL", "RESUME", "NOP")]
    for at, here in enumerate(instructions):
        named = here.argval if isinstance(here.argval, tuple) else (here.argval,)
        if not here.opname.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST")) or not names.intersection(named):
            continue
        key = _lookup(instructions, at)
        if key is None:
            return None
        keys.add(key)
    return frozenset(keys)


def _lookup(instructions: list[dis.Instruction], at: int) -> str | None:
    """The key when instruction `at` loads a dict for `d["key"]`, `d.get("key")` or `"key" in d`."""
    here, rest = instructions[at], instructions[at + 1 : at + 3]
    if here.opname not in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK") or not rest:
        return None
    if rest[0].opname == "CONTAINS_OP":
        return _text(instructions[at - 1]) if at else None
    if len(rest) < 2:
        return None
    first, second = rest
    if first.opname in ("LOAD_METHOD", "LOAD_ATTR") and first.argval == "get":
        return _text(second)
    if second.opname == "BINARY_SUBSCR" or (second.opname == "BINARY_OP" and second.argrepr == "[]"):
        return _text(first)
    return None


def _text(instruction: dis.Instruction) -> str | None:
    return instruction.argval if instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, str) else None


# Functions among a block's arguments that close over an object which changes, such as a cache. Qwen-Image 2.1 passes each block
# its attention as a closure; in the first step that closure puts keys and values of the text into a cache, under the block's
# number. Compiled, each block would need a graph. That step runs once, on the tokens of the text alone, and stays eager.
_FUNCTION = types.FunctionType | types.MethodType | functools.partial
_SEQUENCE = list | tuple | set | frozenset
# Guards see what the block reads of these.
_PLAIN = torch.Tensor | nn.Module | Mapping | type | types.ModuleType
_FIXED = type | types.ModuleType | types.FunctionType | nn.Module
_LIBRARIES = {"torch", *sys.stdlib_module_names}
_STORES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_ATTR", "DELETE_SUBSCR"}
_CHANGERS = {"append", "appendleft", "extend", "insert", "update", "setdefault", "add", "pop", "popitem", "remove", "clear"}
# Python calls other methods of this form, and objects that never change have them as well (frozen dataclasses).
_SPECIAL = {"__call__", "__setitem__", "__delitem__"}

_changing: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def changes_an_object(args: tuple, kwargs: dict) -> bool:
    """Whether one of the arguments is a function that holds an object whose own methods change it."""
    return any(_holds_changing(value) for value in (*args, *kwargs.values()) if isinstance(value, _FUNCTION))


def may_hold_state(patch: object) -> bool:
    """Whether the patch is an object, or a function that changes an object that it holds or one of its module."""
    return not isinstance(patch, types.FunctionType) or _changes_module(patch) or changes_an_object((patch,), {})


def _changes_module(function: types.FunctionType) -> bool:
    code, module = function.__code__, function.__globals__
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(code)):
        return True
    named = (module.get(name) for name in code.co_names)
    return _stores(code) and any(
        hasattr(v, "__setitem__") or (hasattr(v, "__dict__") and not isinstance(v, _FIXED)) for v in named
    )


def _holds_changing(value: object, depth: int = 4) -> bool:
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, types.FunctionType):
        inside = contents_of(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, _SEQUENCE):
        inside = list(value)
    else:
        return _is_changing(type(value))
    return depth > 0 and any(_holds_changing(part, depth - 1) for part in inside)


def _is_changing(cls: type) -> bool:
    if cls not in _changing:
        _changing[cls] = any(_stores(method.__code__) for method in _methods(cls))
    return _changing[cls]


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            named = (m for name, m in vars(base).items() if not name.startswith("__") or name in _SPECIAL)
            yield from (method for method in named if isinstance(method, types.FunctionType))


def _stores(code: types.CodeType) -> bool:
    """Whether the code sets attributes or elements, or calls what changes a container."""
    return not _CHANGERS.isdisjoint(code.co_names) or any(i.opname in _STORES for i in dis.get_instructions(code))
