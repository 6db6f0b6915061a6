"""What a block consists of right now.

Other nodes exchange layers inside blocks, give them another class (RES4LYF) or another `forward` (LoRA in bypass mode, KJNodes'
attention for Wan), replace methods of a class or hook into layers, before or after a block was compiled. Guards notice part of
that; the rest is noticed here, before each call.
"""

from __future__ import annotations

import types
import weakref
from typing import Generic, TypeVar

from torch import nn

from ..forwards import given_forward
from .methods import Methods, MethodsNow

Code = types.CodeType | type
T = TypeVar("T")


class BlockState(Generic[T]):
    """The modules inside a block, as they were when it was last looked at; keeps none of them alive.

    Args:
        block: what is compiled; its own given `forward` and hooks are outside of that and do not count.
        now: shared by all that is looked at in one call of a model.

    `groups`: what it runs, by settings. `methods`: those of each class in it, its own class first.
    """

    def __init__(self, block: nn.Module, now: MethodsNow):
        self.groups: dict[tuple, T] = {}
        self.forwards: tuple[tuple[str, Code], ...] = ()
        self.hooked: tuple[str, ...] = ()
        self._freed: list[weakref.ref] = []
        self._alive = []
        for path, module in block.named_modules():
            self._alive.append(weakref.ref(module, self._freed.append))
            if module is block:
                continue
            code = _given_code(module)
            if code is not None:
                self.forwards += ((path, code),)
            if _is_hooked(module):
                self.hooked += (path,)
        self._found = _look_at(block, now)
        self.methods = tuple(methods.key for methods in dict.fromkeys(self._found[1]))

    def holds(self, block: nn.Module, now: MethodsNow) -> bool:
        """Whether nothing in the block has changed since; asked for each block before each call of the model."""
        return not self._freed and _look_at(block, now) == self._found


def _look_at(block: nn.Module, now: MethodsNow) -> tuple[list[int], list[Methods], list[tuple]]:
    """The modules in a block by `id`, the methods of their classes, and what runs something else than its class's forward.

    An `id` is as good as the module while that is alive. Plain dicts and a loop: for SDXL this looks at 2,000 modules a step.
    """
    ids, methods, special = [], [now[block.__class__]], []
    waiting = [*block._modules.values()]
    while waiting:
        module = waiting.pop()
        ids.append(id(module))
        if module is None:
            continue
        methods.append(now[module.__class__])
        entries = module.__dict__
        if entries["_modules"]:
            waiting.extend(entries["_modules"].values())
        if "forward" in entries or entries["_forward_hooks"] or entries["_forward_pre_hooks"]:
            code, hooked = _given_code(module), _is_hooked(module)
            if code is not None or hooked:
                special.append((len(ids), code, hooked))
    return ids, methods, special


def _given_code(module: nn.Module) -> Code | None:
    """The code of a `forward` that somebody has given this one module, or the class of that callable; else None.

    The class's own in the module's dict changes nothing except for guards, so it is removed.
    """
    if "forward" not in module.__dict__:
        return None
    found = given_forward(module)
    if found is None:
        del module.__dict__["forward"]
        return None
    function = getattr(found, "__func__", found)
    return function.__code__ if isinstance(function, types.FunctionType) else type(found)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
