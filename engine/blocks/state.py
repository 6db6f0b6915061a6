"""Tell whether a block still is what it was: its modules, their methods, forwards and hooks.

Other nodes exchange layers inside blocks, give them another class (RES4LYF) or another `forward` (LoRA in bypass mode,
KJNodes' attention for Wan), replace methods of a class or hook into layers, before or after a block was compiled. PyTorch
guards the class of a module, its class attributes and static methods, but no method: compiled code would keep calling the one
that was traced.

Guards compare classes by identity. Some models make a class anew for each instance (Stable Cascade's LayerNorm2d), and some
nodes for each prompt; each would need a graph of its own. `sharing_classes` shows compiled code the first such class, while the
block runs and no longer: by its class another node tells which layers it has to take back.
"""

import sys
import types
import weakref
from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..forwards import callables_of, contents_of, given_forward, is_of_class
from ..per_model import Same, SameObjects

# In a block's `__dict__`: the classes that its modules share. Elsewhere a class that knows its model would keep that alive.
_SHARED = "torch_compile_kit_classes"
Shared = list[tuple[weakref.ref, weakref.ref]]


def shared_classes(block: nn.Module, first: MutableMapping[Hashable, type]) -> Shared:
    """The modules of another class than the one in `first` with the same code and closure, each with that one."""
    pairs, kept = [], []
    for module in block.modules():
        if _is_made_anew(type(module)):
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


def _is_made_anew(cls: type) -> bool:
    """Whether a class is not the one that its module has under its name: it was made by a function, or by `type`."""
    place: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is not cls


def class_key(cls: type) -> Hashable:
    """A key that classes made by one function share while their methods are the same; methods of base classes do not count."""
    if not _is_made_anew(cls):
        return Same(cls), *map(Same, functions_in(cls))
    members: list[tuple] = []
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            cells = tuple(Same(value) for value in contents_of(member) if value is not cls)
            named = sorted((member.__kwdefaults__ or {}).items())
            defaults = *map(Same, member.__defaults__ or ()), *((key, Same(value)) for key, value in named)
            members.append((name, member.__code__, cells, defaults))
        elif not name.startswith("__"):
            members.append((name, Same(member)))
    return cls.__module__, cls.__qualname__, cls.__bases__, tuple(members)


def functions_in(cls: type) -> list[types.FunctionType]:
    return [member for member in cls.__dict__.values() if member.__class__ is types.FunctionType]


# Their methods are not traced.
_COMMON = (nn.Module, object)


class Methods:
    """The methods of a class and of its bases at one time; keeps neither class nor methods alive.

    `key` is equal for the same methods of the same class at another time.
    """

    def __init__(self, cls: type):
        self._functions = SameObjects(_functions(cls))
        self.key = tuple(class_key(base) for base in cls.__mro__ if base not in _COMMON)

    def are_those_of(self, cls: type) -> bool:
        """Whether no method was replaced since."""
        return self._functions.are(_functions(cls))


class MethodsNow(dict[type, Methods]):
    """The methods by class, looked up once; the earlier object if they are the same.

    Attributes:
        current: by `BlockGroup` of a higher floor, whether the functions that its code names are those that they were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: dict[Any, bool] = {}

    def __missing__(self, cls: type) -> Methods:
        methods = _methods.get(cls)
        if methods is None or not methods.are_those_of(cls):
            methods = _methods[cls] = Methods(cls)
        self[cls] = methods
        return methods


_methods: weakref.WeakKeyDictionary[type, Methods] = weakref.WeakKeyDictionary()


def _functions(cls: type) -> list[types.FunctionType]:
    return [function for base in cls.__mro__ if base not in _COMMON for function in functions_in(base)]


Code = types.CodeType | type | Same


class BlockState:
    """The modules inside a block, as they were when the state was made; keeps none of them alive.

    Hooks and a `forward` of the block itself run outside its compiled code and do not count.

    Attributes:
        groups: what the block runs, by settings.
        methods: those of each class in the block, its own class first; then what other nodes have put over methods.
        forwards: by path, what other nodes have put over forwards of the classes.
        shared: for `sharing_classes`.
    """

    def __init__(self, block: nn.Module, now: MethodsNow, first: MutableMapping[Hashable, type]):
        self.shared = shared_classes(block, first)
        self.groups: dict[tuple, Any] = {}  # `BlockGroup` of a higher floor, or None
        self._sizes: list[int] = []
        self.forwards: tuple[tuple[str, tuple[Code, ...]], ...] = ()
        self.hooked: tuple[str, ...] = ()
        self._freed: list[weakref.ref] = []
        self._alive = []
        callables: list[object] = []
        overrides: list[Hashable] = []
        self._callables_at: list[tuple[weakref.ref, str]] = []
        for path, module in block.named_modules():
            reference = weakref.ref(module, self._freed.append)
            self._alive.append(reference)
            for name, value in callables_of(module):
                if is_of_class(module, name, value):  # the host leaves it there, and guards would see it
                    del module.__dict__[name]
                    continue
                self._callables_at.append((reference, name))
                callables.append(value)
                # PyTorch sets no guards on what is over a method of the class.
                if callable(value) and not isinstance(value, type) and hasattr(type(module), name):
                    overrides.append((path, name, tuple(_codes_in(value)) or Same(value)))
            if module is block:
                continue
            code = _given_code(module)
            if code is not None:
                self.forwards += ((path, code),)
            if _is_hooked(module):
                self.hooked += (path,)
        self._callables = SameObjects(callables)
        self._looked_at = _look_at(block, now, self._sizes)
        self.methods = (*(methods.key for methods in dict.fromkeys(self._looked_at[1])), *overrides)

    def holds(self, block: nn.Module, now: MethodsNow) -> bool:
        """Whether nothing in the block has changed; asked for each block before each call of the model."""
        sizes: list[int] = []
        if self._freed or _look_at(block, now, sizes) != self._looked_at:
            return False
        if not self._callables.are(
            module.__dict__.get(name) for reference, name in self._callables_at if (module := reference()) is not None
        ):
            return False
        # To list what each module holds takes ten times as long as the rest.
        if sizes != self._sizes and not self._callables.are(value for m in block.modules() for _, value in callables_of(m)):
            return False
        self._sizes = sizes
        return True


def _look_at(block: nn.Module, now: MethodsNow, sizes: list[int]) -> tuple[list[int], list[Methods], list[tuple]]:
    """List the modules in a block by `id`, the methods of their classes, and the modules with a replaced forward or with hooks;
    `sizes` gets how many attributes each has.

    Written with plain dicts and one loop, since the walk visits 2,000 modules of SDXL in each step.
    """
    ids, methods, special = [], [now[block.__class__]], []
    sizes.append(len(block.__dict__))
    waiting = [*block._modules.values()]
    while waiting:
        module = waiting.pop()
        ids.append(id(module))
        if module is None:
            continue
        methods.append(now[module.__class__])
        entries = module.__dict__
        sizes.append(len(entries))
        if entries["_modules"]:
            waiting.extend(entries["_modules"].values())
        if "forward" in entries or entries["_forward_hooks"] or entries["_forward_pre_hooks"]:
            code, hooked = _given_code(module), _is_hooked(module)
            if code is not None or hooked:
                special.append((len(ids), code, hooked))
    return ids, methods, special


def _given_code(module: nn.Module) -> tuple[Code, ...] | None:
    """The code, or class, of a `forward` that another node has put over that of the module's class, and the code of the
    functions that it closes over; None without one.

    If the module's dict has the forward of its class, only guards see it, so it is removed.
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
