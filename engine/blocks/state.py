"""Detect whether a block has changed: its modules, their methods, forwards and hooks.

Other nodes exchange layers inside blocks, give them another class (RES4LYF) or another `forward` (LoRA in bypass mode,
KJNodes' attention for Wan), replace methods of a class or hook into layers: before a block was compiled, after it, or for the
length of a call. So each call of a block checks the block. PyTorch guards what code reads of modules, objects and Python
modules, also functions there, but no method of a class: compiled code would keep calling the traced method.

Guards compare classes by identity. Some models create a class for each instance (Stable Cascade's LayerNorm2d), and some nodes
for each prompt; each class would need a graph of its own. `sharing_classes` gives modules the first of these classes, only
while the block runs: other nodes recognise by class the layers that they have to restore.
"""

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..ownership import (
    GLOBAL_HOOKS,
    OF_PAGES,
    callables_of,
    contents_of,
    errors_marked,
    exchanged,
    given_forward,
    is_of_class,
)
from ..per_model import Key, Same, SameObjects

# In a block's `__dict__`: the classes that its modules share. Elsewhere, a class that refers to its model would keep it alive.
_SHARED = "torch_compile_kit_classes"
Shared = list[tuple[weakref.ref, weakref.ref]]


def shared_classes(block: nn.Module, first: MutableMapping[Hashable, type]) -> Shared:
    """(module, class) for each module whose class is not that in `first` with the same code and closure."""
    pairs, kept = [], []
    for module in block.modules():
        if is_made_anew(type(module)):
            kept.append(shared := first.setdefault(class_key(type(module)), type(module)))
            if type(module) is not shared:
                pairs.append((weakref.ref(module), weakref.ref(shared)))
    block.__dict__.pop(_SHARED, None)
    if kept:
        block.__dict__[_SHARED] = tuple(dict.fromkeys(kept))
    return pairs


@contextmanager
def sharing_classes(pairs: Shared) -> Iterator[None]:
    """While a block runs, its modules have the classes with which its code was traced."""
    before = []
    try:
        for module, shared in ((module(), shared()) for module, shared in pairs):
            if module is not None and shared is not None:
                before.append((module, type(module), shared))
                module.__class__ = shared
        yield
    finally:
        for module, cls, shared in before:
            if type(module) is shared:
                module.__class__ = cls


# In a layer's `__dict__`: the forward that `_run_outside` replaces and calls.
_OUTSIDE = "torch_compile_kit_forward"


@contextmanager
def forwards_outside(layers: Iterable[weakref.ref]) -> Iterator[None]:
    """While a block runs, the layers' forwards run outside of its graphs: objects that another node has made for each layer, or
    for each call (`functools.partial`), would each need a graph of their own."""
    present = [layer for reference in layers if (layer := reference()) is not None and _runs_an_object(layer)]
    with (
        exchanged({layer: vars(layer)["forward"] for layer in present}, _OUTSIDE),
        exchanged({layer: types.MethodType(_run_outside, layer) for layer in present}),
    ):
        yield


def _runs_an_object(layer: nn.Module) -> bool:
    forward = given_forward(layer)
    return forward is not None and not isinstance(forward, types.FunctionType | types.MethodType)


@torch.compiler.disable(reason="another node's objects are called outside of the graphs")
def _run_outside(layer: nn.Module, *args: object, **kwargs: object) -> object:
    with errors_marked():
        return vars(layer)[_OUTSIDE](*args, **kwargs)


def is_made_anew(cls: type) -> bool:
    """Whether a class was made by a function or by `type`: its Python module has another object, or none, under its name."""
    place: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is not cls


def class_key(cls: type) -> Hashable:
    """A key that classes made by one function share while the code of their methods, and the values in its closures, are the
    same; methods of base classes do not count."""
    methods = tuple((name, _method_key(member, cls)) for name, member in sorted(_methods_in(cls).items()))
    if not is_made_anew(cls):
        return Same(cls), methods
    others = ((n, Same(v)) for n, v in sorted(vars(cls).items()) if not n.startswith("__") and not _functions_in(v))
    return cls.__module__, cls.__qualname__, cls.__bases__, methods, tuple(others)


# The methods of PyTorch's own base class that run when a module is called.
_CALLED = {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"}


def _methods_in(cls: type) -> dict[str, object]:
    members = {name: member for name, member in vars(cls).items() if name != "__init__" and _functions_in(member)}
    return {name: members[name] for name in _CALLED & members.keys()} if cls is nn.Module else members


def _method_key(member: object, cls: type) -> Hashable:
    keys: list[Hashable] = [type(member).__name__]
    for function in _functions_in(member):
        closed_over = [value for value in contents_of(function) if value is not cls]
        named = sorted((function.__kwdefaults__ or {}).items())
        held = (*closed_over, *(function.__defaults__ or ()), *(value for _, value in named))
        plain = bool, int, float, str, type(None)
        keys.append((function.__code__, *((type(v), repr(v)) if type(v) in plain else Same(v) for v in held)))
    return tuple(keys)


def _functions_in(member: object) -> list[types.FunctionType]:
    """The functions of a method, class method, static method or property."""
    if type(member) is types.FunctionType:
        return [member]
    if not isinstance(member, classmethod | staticmethod | property | functools.cached_property):
        return []
    parts = (getattr(member, name, None) for name in ("__func__", "fget", "fset", "func"))
    return [part for part in parts if isinstance(part, types.FunctionType)]


class Methods:
    """A snapshot of the methods in a class's own dict; equal methods have equal keys (`key`). Keeps no method alive."""

    def __init__(self, cls: type):
        members = _methods_in(cls)
        self._cls = weakref.ref(cls)
        self._size = len(vars(cls))
        self._get: Callable[[Any], tuple] = operator.itemgetter(*members, "__module__", "__module__")  # two names give a tuple
        self._ids = [*map(id, self._get(vars(cls)))]
        self._freed: list[weakref.ref] = []
        functions = (function for member in members.values() for function in _functions_in(member))
        self._functions = [weakref.ref(function, self._freed.append) for function in functions]
        self.key = Key(class_key(cls))

    def are_current(self) -> bool:
        """Whether no method was replaced since the snapshot."""
        cls = self._cls()
        if self._freed or cls is None:
            return False
        members = cls.__dict__
        try:
            return len(members) == self._size and [*map(id, self._get(members))] == self._ids
        except KeyError:
            return False


_methods: weakref.WeakKeyDictionary[type, Methods] = weakref.WeakKeyDictionary()


def methods_of(classes: Iterable[type]) -> list[Methods]:
    """The methods of the classes and of their bases; a class whose methods are unchanged keeps its `Methods` object."""
    current = []
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__ if _has_methods(base)):
        methods = _methods.get(base)
        if methods is None or not methods.are_current():
            methods = _methods[base] = Methods(base)
        current.append(methods)
    return current


def _has_methods(cls: type) -> bool:
    """Whether methods of a class can be replaced: not in classes written in C, some without `__module__` (`ctypes`, `str`)."""
    return bool(cls.__flags__ & _MADE_BY_PYTHON) and "__module__" in vars(cls)


_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE of Include/object.h
Code = types.CodeType | type | Same


class BlockState:
    """A snapshot of the modules inside a block; keeps none of them alive.

    Hooks and a `forward` of the block itself run outside its compiled code and do not count.

    Attributes:
        groups: `settings_key()` -> the block's group, or None.
        options: the `OptionsFilter` of the block, set by `ModelCode` (compile/registry.py).
        methods: keys of the methods of all modules and plain objects in the block; then attributes that hide a method.
        forwards: (path, code) of each forward that another node has put over that of the class.
        callables: other callables in the dicts of modules, and attributes that are None.
    """

    def __init__(self, block: nn.Module, first: MutableMapping[Hashable, type]):
        self.shared = shared_classes(block, first)
        self.outside: list[weakref.ref] = []
        self.groups: dict[tuple, Any] = {}
        self.options: Any = None
        self.forwards: tuple[tuple[str, tuple[Code, ...]], ...] = ()
        self.hooked: tuple[str, ...] = ("all modules",) if any(GLOBAL_HOOKS) else ()
        self._freed: list[weakref.ref] = []
        self._alive = []
        callables: list[object] = []
        overrides: list[Hashable] = []
        classes: dict[type, None] = {}
        self._callables_at: list[tuple[weakref.ref, str]] = []
        for path, module in block.named_modules():
            reference = weakref.ref(module, self._freed.append)
            self._alive.append(reference)
            attributes = [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
            classes |= dict.fromkeys((type(module), *_classes_in(attributes)))
            for name, value in callables_of(module):
                if is_of_class(module, name, value):  # the host leaves it there, and guards would see it
                    del module.__dict__[name]
                    continue
                self._callables_at.append((reference, name))
                callables.append(value)
                # PyTorch sets no guards on an attribute that hides a method of the class.
                if callable(value) and not isinstance(value, type) and hasattr(type(module), name):
                    overrides.append((path, name, tuple(_codes_in(value)) or Same(value)))
            if module is block:
                continue
            code = _given_code(module)
            if code is not None:
                self.forwards += ((path, code),)
                self.outside += [reference] if _runs_an_object(module) else []
            if _is_hooked(module):
                self.hooked += (path,)
        self.callables = tuple(map(Same, callables))
        self._callables = SameObjects(callables)
        self._looked_at, self._sizes = _look_at(block)
        self._methods = methods_of(classes)
        self.methods = (*(methods.key for methods in self._methods), *overrides)

    def holds(self, block: nn.Module) -> bool:
        """Whether nothing in the block has changed; called before each call of the block."""
        looked_at, sizes = _look_at(block)
        if self._freed or looked_at != self._looked_at or not all(methods.are_current() for methods in self._methods):
            return False
        present = ((module, name) for reference, name in self._callables_at if (module := reference()) is not None)
        if not self._callables.are(module.__dict__.get(name) for module, name in present):
            return False
        # Only if a size has changed, as listing what each module holds takes ten times as long as the rest.
        if sizes != self._sizes and not self._callables.are(value for m in block.modules() for _, value in callables_of(m)):
            return False
        self._sizes = sizes
        return True


def _look_at(block: nn.Module) -> tuple[tuple[bool, list[int], list[tuple]], list[int]]:
    """What `holds` compares: whether there are hooks for all modules, the `id` of each module in a block and of its class, and
    the modules with a replaced forward or with hooks; and how many attributes each module has.

    Written with plain dicts and one loop, since the walk visits 2,000 modules of SDXL in each step.
    """
    ids, special, sizes = [id(block.__class__)], [], [len(block.__dict__)]
    waiting = [*block._modules.values()]
    while waiting:
        module = waiting.pop()
        ids += id(module), id(module.__class__)
        if module is None:
            continue
        entries = module.__dict__
        sizes.append(len(entries))
        if entries["_modules"]:
            waiting.extend(entries["_modules"].values())
        if "forward" in entries or entries["_forward_hooks"] or entries["_forward_pre_hooks"]:
            code, hooked = _given_code(module), _is_hooked(module)
            if code is not None or hooked:
                special.append((len(ids), code, hooked))
    return (any(GLOBAL_HOOKS), ids, special), sizes


def _classes_in(value: Any, depth: int = 4) -> Iterator[type]:
    """The classes of plain objects in an attribute: the value, items of containers, and attributes of such objects."""
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType | types.FunctionType | types.MethodType):
        return
    if isinstance(value, dict | list | tuple):
        inside = [*(value.values() if isinstance(value, dict) else value)]
    elif type(value).__module__.partition(".")[0] in _LIBRARIES:
        return
    else:
        yield type(value)
        inside = [*getattr(value, "__dict__", {}).values()]
    if depth and len(inside) <= _LONGEST:
        for part in inside:
            yield from _classes_in(part, depth - 1)


# Longer lists and dicts hold data, and are not looked into.
_LONGEST = 64
# Objects that the host keeps on layers for their weights come and go in a run.
_OF_EVERY_MODULE = {"forward", _SHARED, *vars(nn.Module()), *OF_PAGES, "weight_function", "bias_function"}
_LIBRARIES = {"torch", *sys.stdlib_module_names}


def _given_code(module: nn.Module) -> tuple[Code, ...] | None:
    """The code, or class, of a `forward` that another node has put over that of the module's class, and the code of the
    functions that it closes over; None without one.

    A class's own forward in the module's dict is removed: it changes nothing, but PyTorch's guards would see it.
    """
    if "forward" not in module.__dict__:
        return None
    forward = given_forward(module)
    if forward is None:
        del module.__dict__["forward"]
        return None
    return tuple(_codes_in(forward)) or (type(forward),)


def _codes_in(function: object, depth: int = 4) -> Iterator[Code]:
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        yield function.__code__
        if depth:
            for held in contents_of(function):
                yield from _codes_in(held, depth - 1)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
