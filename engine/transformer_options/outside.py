"""Call patches outside of the graphs of a block, with the host's own options.

A patch may read anything, change anything and keep state anywhere. Dynamo breaks the graph at a `Patch`: the code before and
after the call stays compiled, in graphs that do not depend on the patch, and that all blocks, steps and patches share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..ownership import errors_marked

OVERRIDE = "optimized_attention_override"
# Under this key a block's options hold their `HostOptions`, also in the copy that a UNet's block makes for its patches.
HOLDER = "torch_compile_kit"
_ABSENT = object()


class HostOptions:
    """The host's options of one call of a block; `_handed` is a copy of the dict that the block gets, as handed over.

    Only that dict refers to this object: a cycle would keep models and tensors of the call until garbage is collected.
    """

    def __init__(self, host: dict):
        self._host = host
        self._handed: dict = {}
        self._id = 0

    def put_into(self, kept: dict, patches: dict, override: Callable | None) -> list[tuple[str, Callable]]:
        """Put `patches`, the replacements in `kept` and the override into `kept`, each in a `Patch`; returns all of them with
        their names."""
        wrapped: list[tuple[str, Callable]] = []

        def wrap(name: str, value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(wrap(name, one) for one in value)
            if not callable(value):
                return value
            wrapped.append((name, value))
            return Patch(value, self)

        kept["patches"] = {name: wrap(name, value) for name, value in patches.items()}
        kept["patches_replace"] = {
            # Another pack's own kind may be no dict.
            name: {at: wrap(name, v) for at, v in table.items()} if isinstance(table, dict) else wrap(name, table)
            for name, table in kept["patches_replace"].items()
        }
        if override is not None:
            kept[OVERRIDE] = wrap(OVERRIDE, override)
        self._handed, self._id = dict(kept), id(kept)
        kept[HOLDER] = self
        return wrapped

    def whole(self, given: dict) -> dict:
        """The complete options for `given`, which is the dict that the block got or a copy that the block has made."""
        changed = {k: v for k, v in given.items() if k != HOLDER and self._handed.get(k, _ABSENT) is not v}
        if id(given) == self._id:
            self._host.update(changed)
            return self._host
        removed = self._handed.keys() - given.keys()
        return {**{k: v for k, v in self._host.items() if k not in removed}, **changed}

    def call(self, patch: Callable, args: tuple, kwargs: dict) -> object:
        written: list[tuple[dict, dict, dict]] = []
        given_by_name = {name: self._exchanged(value, written) for name, value in kwargs.items()}
        result = patch(*(self._exchanged(value, written) for value in args), **given_by_name)
        for given, whole, before in written:  # what the patch wrote for later patches and blocks
            given.update({k: v for k, v in whole.items() if before.get(k, _ABSENT) is not v})
            for removed in before.keys() - whole.keys():
                given.pop(removed, None)
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


class Patch:
    """Replaces a patch in the options of a block, with the attributes of the patch."""

    def __init__(self, patch: Callable, options: HostOptions):
        self._patch, self._options = patch, weakref.ref(options)

    @torch.compiler.disable(reason="patches are called outside of the graphs")
    def __call__(self, *args: object, **kwargs: object) -> object:
        options = self._options()
        with errors_marked():
            return self._patch(*args, **kwargs) if options is None else options.call(self._patch, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_patch" not in self.__dict__:  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._patch, name)

    def __deepcopy__(self, _memo: dict) -> Patch:
        return self
