"""Call patches outside of the graphs of a block, with the host's own options.

A patch that reads what differs in each block or step, or keeps state by them, would be traced into a graph for each. Dynamo
breaks the graph at `OutsidePatch` instead: what is before and behind the patch stays compiled.
"""

from __future__ import annotations

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

    def exchanged(value: Any) -> Any:
        return [*map(exchanged, value)] if isinstance(value, list) else outer.get(id(value), value)

    kept["patches"] = {name: exchanged(value) for name, value in kept["patches"].items()}
    tables = kept["patches_replace"]
    kept["patches_replace"] = {name: {place: exchanged(patch) for place, patch in t.items()} for name, t in tables.items()}
    if OVERRIDE in kept:
        kept[OVERRIDE] = exchanged(kept[OVERRIDE])
    holder.handed = dict(kept)


class HostOptions:
    """The host's options of one call of a block, and `kept`, what the block gets of them; `handed` is that as it was."""

    def __init__(self, host: dict, kept: dict):
        self._host, self._kept = host, kept
        self.handed: dict = {}

    def whole(self, given: dict) -> dict:
        """What `given`, the options or the block's copy of them, would be without the filter."""
        changed = {k: v for k, v in given.items() if self.handed.get(k, _ABSENT) is not v}
        if given is self._kept:
            self._host.update(changed)
            return self._host
        removed = self.handed.keys() - given.keys()
        return {**{k: v for k, v in self._host.items() if k not in removed}, **changed}

    def call(self, patch: Callable, args: tuple, kwargs: dict) -> object:
        written: list[tuple[dict, dict, dict]] = []

        def exchanged(value: object) -> object:
            if not isinstance(value, dict):
                return value
            if value.get(HOLDER) is self:
                whole = self.whole(value)
                written.append((value, whole, dict(whole)))
                return whole
            inner = value.get("transformer_options")  # ldm/wan/model.py passes one dict of arguments
            return value if inner is None else {**value, "transformer_options": exchanged(inner)}

        result = patch(*map(exchanged, args), **{name: exchanged(value) for name, value in kwargs.items()})
        for given, whole, before in written:  # what the patch wrote for later patches and blocks
            given.update({k: v for k, v in whole.items() if before.get(k, _ABSENT) is not v})
        return result


class OutsidePatch:
    """In place of a patch in the options of a block."""

    def __init__(self, patch: Callable, options: HostOptions):
        self._patch, self._options = patch, options

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _call(self, args, kwargs)


@torch.compiler.disable
def _call(outside: OutsidePatch, args: tuple, kwargs: dict) -> object:
    return outside._options.call(outside._patch, args, kwargs)
