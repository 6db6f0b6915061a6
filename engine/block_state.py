"""What a block consists of right now.

Other nodes exchange layers inside blocks, give them another `forward` (LoRA in bypass mode, KJNodes' attention for Wan) or hook
into them, before or after a block was compiled. Guards notice part of that; the rest is noticed here, before each call.
"""

from __future__ import annotations

import types
import weakref

from torch import nn

from .compiled_kind import CompiledKind

Code = types.CodeType | type


class BlockState:
    """The modules inside a block, as they were when it was last looked at; keeps none of them alive.

    Args:
        block: what is compiled; its own `forward` and hooks are outside of that and do not count.
    """

    def __init__(self, block: nn.Module):
        self.kinds: dict[tuple, CompiledKind] = {}
        self.forwards: tuple[tuple[str, Code], ...] = ()
        self.hooked: tuple[str, ...] = ()
        self._parts = []
        for path, module in block.named_modules():
            code = None if module is block else own_forward(module)
            hooked = module is not block and _is_hooked(module)
            if code is not None:
                self.forwards += ((path, code),)
            if hooked:
                self.hooked += (path,)
            children = tuple(None if m is None else weakref.ref(m) for m in module._modules.values())
            self._parts.append((weakref.ref(module), children, code, hooked))

    def holds(self, block: nn.Module) -> bool:
        """Whether nothing in the block has changed since."""
        for reference, children, code, hooked in self._parts:
            module = reference()
            if module is None or len(module._modules) != len(children):
                return False
            for child, found in zip(children, module._modules.values(), strict=True):
                if found is not (None if child is None else child()):
                    return False
            if module is not block:
                if ("forward" in module.__dict__ or code is not None) and own_forward(module) is not code:
                    return False
                if _is_hooked(module) != hooked:
                    return False
        return True


def own_forward(module: nn.Module) -> Code | None:
    """The code of a `forward` that somebody has given this one module, or the class of that callable; else None.

    The host leaves the class's own forward in the module's dict when it takes another one back (weight_adapter/bypass.py);
    that changes nothing except for guards, so it is removed.
    """
    found = module.__dict__.get("forward")
    if found is None:
        return None
    function = getattr(found, "__func__", found)
    if function is type(module).forward and getattr(found, "__self__", None) is module:
        del module.__dict__["forward"]
        return None
    return function.__code__ if isinstance(function, types.FunctionType) else type(found)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
