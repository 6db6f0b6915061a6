"""Tell in one process whether a function or class is the same as in another.

Dynamo's guards compare addresses, which mean nothing after a restart. What is named here is known by its module, its name and a
digest of its code, for classes that of all methods. Only what the name leads back to is named at all: what a function makes may
be freed, and its address given to another object. Classes are the exception, ComfyUI makes layers for quantized weights so; who
compares their addresses must keep them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import types

import torch

# Dynamo does that with methods of torch.nn.Module (torch/_dynamo/mutation_guard.py).
_REPLACED = ("__init__", "__setstate__")
# Types of functions and the like, which say of themselves that they are among the built-in names.
_TYPES = {value: name for name, value in vars(types).items() if isinstance(value, type)}


class Unnamed(Exception):
    """An object cannot be told by its name."""


def name_of(value: object) -> str:
    """A text that is the same in another process if, and only if, the object there is the same.

    Raises:
        Unnamed: no name leads to it (made inside a function, or an instance).
    """
    if value is None or isinstance(value, bool) or value is ... or value is NotImplemented:
        return repr(value)
    if isinstance(value, types.ModuleType):
        name = value.__name__
        parent, _, last = name.rpartition(".")  # torch.ops makes its modules when they are asked for
        if sys.modules.get(name) is not value and (parent != "torch.ops" or getattr(torch.ops, last) is not value):
            raise Unnamed(f"module {name}")
        return f"module {name}"
    if isinstance(value, torch._ops.OpOverload):
        return f"{name_of(value.overloadpacket)} {value._overloadname}"
    if isinstance(value, torch._ops.OpOverloadPacket):
        namespace, _, name = value._qualified_op_name.partition("::")
        if getattr(getattr(torch.ops, namespace), name) is not value:
            raise Unnamed(f"operator {value._qualified_op_name}")
        return f"operator {value._qualified_op_name}"
    if isinstance(value, types.CodeType):
        return f"code {digest_of(value)}"
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))} {value.name}"
    if isinstance(value, type) and value in _TYPES:
        return f"class types.{_TYPES[value]}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(name, str) or not (isinstance(value, type) or callable(value)):
        raise Unnamed(f"{type(value).__name__} without a name")
    if module is None:  # methods of built-in types
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        if not isinstance(owner, type | types.ModuleType) or getattr(owner, value.__name__, None) != value:
            raise Unnamed(name)
        return f"{name_of(owner)} {value.__name__}"
    if isinstance(value, types.BuiltinFunctionType) and found_at(module, value.__name__) is value:  # torch.cat, whose
        name = value.__name__  # qualified name is that of a hidden class
    elif found_at(module, name) is not value and not (isinstance(value, type) and "<locals>" in name):
        raise Unnamed(f"{module}.{name}")
    kind = "class" if isinstance(value, type) else type(value).__name__
    return f"{kind} {module}.{name} {functions_in(value)}"


def found_at(module: str, qualname: str) -> object:
    """What a module has under a qualified name now, the function itself in place of a static or class method; else None."""
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return getattr(found, "__func__", found)


def code_in(value: object) -> dict[str, types.CodeType]:
    """The code of a function and of functions that it wraps or closes over; of all methods of a class, inherited ones too."""
    if isinstance(value, type):
        members = {name: member for owner in reversed(value.__mro__) for name, member in vars(owner).items()}
        for name in _REPLACED:
            if members.get(name) is vars(torch.nn.Module)[name]:
                del members[name]
        parts = [(name, code_in(member).values()) for name, member in sorted(members.items())]
        return {f"{name} {number}": code for name, found in parts for number, code in enumerate(found)}
    if isinstance(value, types.CodeType):
        return {"0": value}
    found, pending, seen = {}, [value], set()
    while pending:
        value = pending.pop()
        for name in ("fget", "__func__"):  # of a property, a static or class method
            value = getattr(value, name, value)
        if id(value) in seen or not isinstance(value, types.FunctionType):
            continue
        seen.add(id(value))
        found[str(len(found))] = value.__code__
        pending.append(getattr(value, "__wrapped__", None))
        for cell in value.__closure__ or ():
            try:
                pending.append(cell.cell_contents)
            except ValueError:  # empty
                continue
    return found


def functions_in(value: object) -> str:
    """A digest of `code_in`, empty if there is none."""
    found = [f"{name} {digest_of(code)}" for name, code in code_in(value).items()]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:16] if found else ""


def nested_in(code: types.CodeType) -> set[types.CodeType]:
    """It, and the code of the functions that it makes."""
    inner = [nested_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {code}.union(*inner)


@functools.lru_cache(maxsize=4096)
def digest_of(code: types.CodeType) -> str:
    """What a code object does, whichever process or file it is in."""
    parts = [code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags]
    parts += [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, [_constant(c) for c in code.co_consts]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return digest_of(value)
    if isinstance(value, frozenset):  # in another order in each process
        return repr(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return repr(list(map(_constant, value)))
    return repr(value)
