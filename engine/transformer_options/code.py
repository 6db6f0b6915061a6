"""Find the code that an `nn.Module` runs: methods, and functions in Python modules or on `nn.Module`s that methods name."""

import functools
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ..ownership import callables_of, codes_in, contents_of, forward_inside, given_forward, is_ours, named_by, noted_for
from ..per_model import SameObjects
from ..torch_settings import original

# How many functions deep code is followed.
DEPTH = 4


class NamedFunctions:
    """A snapshot of the functions that code names in Python modules; keeps none of them alive.

    Other nodes exchange such functions (`comfy.ldm.flux.layers.attention`) for functions that read more of the options. If a
    `SharedScope` has replaced a function, the replacement counts as that function.
    """

    def __init__(self, codes: Mapping[types.CodeType, dict]):
        places: dict[int, tuple[dict, dict[str, None]]] = {}
        for code, module in codes.items():
            for entries, name, value in named_by(code, module):
                if callable(value):
                    places.setdefault(id(entries), (entries, {}))[1][name] = None
        self._places = [(e, operator.itemgetter(*names, next(iter(names)))) for e, names in places.values()]
        self._originals = self._last_seen = SameObjects(map(original, self._now()))

    def are_current(self) -> bool:
        """Whether no function was exchanged since the snapshot."""
        try:
            now = self._now()
        except KeyError:  # a name is gone
            return False
        if self._last_seen.are(now):
            return True
        if not self._originals.are(map(original, now)):
            return False
        self._last_seen = SameObjects(now)
        return True

    def _now(self) -> list[object]:
        return [*itertools.chain.from_iterable(get(entries) for entries, get in self._places)]


def codes_of(block: nn.Module, modules: Iterable[nn.Module]) -> dict[types.CodeType, dict]:
    """The code of `modules`, which are in `block`, and of the functions that this code names; each with its globals."""
    seen: dict[types.CodeType, dict] = {}
    modules = list(modules)
    functions = [*_forwards_given_to(module for module in modules if module is not block)]
    for cls in dict.fromkeys(map(type, modules)):
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
                members = {name: getattr(member, "__func__", member) for name, member in vars(base).items()}
                members = {name: noted_for(member) or member for name, member in members.items()}
                if issubclass(type(block), base):  # what wraps its forward runs outside of its graphs (`BlockGroup`)
                    members["forward"] = forward_inside(base)
                functions += (member for member in members.values() if isinstance(member, types.FunctionType))
    # Only attributes that the code names: in one that no code names, a trainer keeps the forward that it has replaced.
    attributes: dict[str, dict[int, object]] = {}
    held = (entry for module in modules for entry in callables_of(module))
    for name, value in (entry for entry in held if not is_ours(entry[1])):
        attributes.setdefault(name, {})[id(value)] = value
    for _ in range(1 + DEPTH):
        functions = [named for function in functions for named in _functions_in(function, seen, attributes)]
    return seen


def _forwards_given_to(modules: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    for replaced in map(given_forward, modules):
        functions = [getattr(replaced, "__func__", replaced)]
        if isinstance(replaced, types.MethodType):
            functions += vars(type(replaced.__self__)).values()
        yield from (function for function in functions if isinstance(function, types.FunctionType))


def _functions_in(
    function: types.FunctionType, seen: dict[types.CodeType, dict], attributes: Mapping[str, Mapping[int, object]]
) -> Iterator[types.FunctionType]:
    """The functions that `function` names in Python modules or `attributes`, or closes over; skips code that is in `seen`."""
    for code in codes_in(function.__code__):
        if code in seen:
            continue
        seen[code] = function.__globals__  # not of `__module__`, which `functools.wraps` copies
        named = (value for _, _, value in named_by(code, function.__globals__))
        names = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}  # getattr(self, "attention")
        held = (value for name in names for value in attributes.get(name, {}).values())
        for target in [*named, *held, *contents_of(function)]:
            while isinstance(target, functools.partial):
                target = target.func
            target = original(target.__func__ if isinstance(target, types.MethodType) else target)
            if not isinstance(target, types.FunctionType):
                target = getattr(type(target), "__call__", None)  # noqa: B004  the one that a call uses
            if isinstance(target, types.FunctionType) and not (target.__module__ or "").startswith("torch"):
                yield target
