"""Call patches outside of the graphs of a block, with the host's own options.

A patch that reads what differs in each block or step, or keeps state by them, would be traced into a graph for each. Dynamo
breaks the graph at `OutsidePatch` instead: what is before and behind the patch stays compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .patches import OVERRIDE

# Under this key a block's options hold their `HostOptions`, also in the copy that a UNet's block makes for its patches.
HOLDER = "torch_compile_kit"
_ABSENT = object()


def call_outside(patches: Iterable[Callable], kept: dict, host: dict) -> None:
    """Put an `OutsidePatch` in the place of each of `patches` in `kept`, what a block gets of the options `host`."""
    holder = kept[HOLDER] = HostOptions(host, kept)
    outer = {id(patch): OutsidePatch(patch, holder) for patch in patches}
    kept["patches"] = {name: _exchanged(value, outer) for name, value in kept["patches"].items()}
    tables = kept["patches_replace"]
    kept["patches_replace"] = {name: {at: _exchanged(patch, outer) for at, patch in t.items()} for name, t in tables.items()}
    if OVERRIDE in kept:
        kept[OVERRIDE] = _exchanged(kept[OVERRIDE], outer)
    holder.handed = {name: value for name, value in kept.items() if name != HOLDER}


def _exchanged(value: Any, outer: dict[int, OutsidePatch]) -> Any:
    return [_exchanged(one, outer) for one in value] if isinstance(value, list) else outer.get(id(value), value)


class HostOptions:
    """The host's options of one call of a block; `handed` is what the block gets of them, `kept`, as it was.

    Nothing refers to it but `kept`: options hold models and tensors of the call, which would stay until garbage is collected.
    """

    def __init__(self, host: dict, kept: dict):
        self._host, self._kept = host, id(kept)
        self.handed: dict = {}

    def whole(self, given: dict) -> dict:
        """What `given`, the options or the block's copy of them, would be without the filter."""
        changed = {k: v for k, v in given.items() if k != HOLDER and self.handed.get(k, _ABSENT) is not v}
        if id(given) == self._kept:
            self._host.update(changed)
            return self._host
        removed = self.handed.keys() - given.keys()
        return {**{k: v for k, v in self._host.items() if k not in removed}, **changed}

    def call(self, patch: Callable, args: tuple, kwargs: dict) -> object:
        written: list[tuple[dict, dict, dict]] = []
        given_by_name = {name: self._exchanged(value, written) for name, value in kwargs.items()}
        result = patch(*(self._exchanged(value, written) for value in args), **given_by_name)
        for given, whole, before in written:  # what the patch wrote for later patches and blocks
            given.update({k: v for k, v in whole.items() if before.get(k, _ABSENT) is not v})
        return result

    def _exchanged(self, value: object, written: list[tuple[dict, dict, dict]]) -> object:
        if not isinstance(value, dict):
            return value
        if value.get(HOLDER) is self:
            whole = self.whole(value)
            written.append((value, whole, dict(whole)))
            return whole
        inner = value.get("transformer_options")  # ldm/wan/model.py passes one dict of arguments
        return value if inner is None else {**value, "transformer_options": self._exchanged(inner, written)}


class OutsidePatch:
    """In place of a patch in the options of a block."""

    def __init__(self, patch: Callable, options: HostOptions):
        self._patch, self._options = patch, weakref.ref(options)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _call(self, args, kwargs)


@torch.compiler.disable
def _call(outside: OutsidePatch, args: tuple, kwargs: dict) -> object:
    options = outside._options()
    return outside._patch(*args, **kwargs) if options is None else options.call(outside._patch, args, kwargs)
