"""A model that is called with another model's options: the host's guider of two models runs both with those of the first
(comfy_extras/nodes_custom_sampler.py, `Guider_DualModel`), so what the second one carries would never be called.
"""

from __future__ import annotations

from typing import Any

from comfy.patcher_extension import WrappersMP

APPLY = "apply_model"


class _Applied:
    """In place of the base model's `apply_model` for a run: calls that lack our wrapper get the patcher's.

    Args:
        patcher: the model is its own as long as no other patcher of the same model samples.
        found: what was in its place on the instance, or None.
    """

    def __init__(self, patcher: Any, key: str, found: Any):
        self._patcher, self._key, self.found = patcher, key, found

    def __call__(self, *args: object, **kwargs: Any) -> object:
        patcher, key, options = self._patcher, self._key, kwargs.get("transformer_options") or {}
        wrappers = options.get("wrappers", {})
        known, base_model = wrappers.get(WrappersMP.APPLY_MODEL, {}), patcher.model
        if key not in known and getattr(base_model, "current_patcher", patcher) is patcher:
            ours = {**known, key: patcher.get_wrappers(WrappersMP.APPLY_MODEL, key)}
            kwargs["transformer_options"] = {**options, "wrappers": {**wrappers, WrappersMP.APPLY_MODEL: ours}}
        if self.found is not None:
            return self.found(*args, **kwargs)
        return type(base_model).apply_model(base_model, *args, **kwargs)


def bring_wrapper(patcher: Any, key: str) -> None:
    """From now on, until `take_wrapper`, calls of the patcher's model are wrapped by what the patcher has under `key`."""
    take_wrapper(patcher)
    table = patcher.model.__dict__
    table[APPLY] = _Applied(patcher, key, table.get(APPLY))


def take_wrapper(patcher: Any) -> None:
    """The run is over, or has never begun."""
    table = patcher.model.__dict__
    applied = table.get(APPLY)
    if isinstance(applied, _Applied):
        del table[APPLY]
        if applied.found is not None:
            table[APPLY] = applied.found
