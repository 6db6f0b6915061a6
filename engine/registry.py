"""Compiled code by model: shared by all clones and nodes, kept across executions, freed with the model."""

from __future__ import annotations

import types
import weakref

from torch import nn

from .block_options import OptionsFilter
from .compiled_kind import CompiledKind, structure_of
from .settings import CompileSettings


class ModelCode:
    """The compiled kinds of one diffusion model, per settings."""

    def __init__(self) -> None:
        self.kinds: dict[tuple, CompiledKind] = {}
        self.first_inputs: dict[tuple, tuple] = {}
        self._of_block: weakref.WeakKeyDictionary[nn.Module, dict[tuple, CompiledKind]] = weakref.WeakKeyDictionary()

    def kind_of(self, block: nn.Module, settings: CompileSettings) -> CompiledKind | None:
        """The kind that runs `block`, made on first use; None when its forward is no Python function."""
        kind_key = settings.kind_key()
        by_settings = self._of_block.setdefault(block, {})
        if kind_key not in by_settings:
            by_settings[kind_key] = self._find_kind(block, settings, kind_key)
        return by_settings[kind_key]

    def _find_kind(self, block: nn.Module, settings: CompileSettings, kind_key: tuple) -> CompiledKind | None:
        forward = type(block).forward
        if not isinstance(forward, types.FunctionType):
            return None
        key = (forward, structure_of(block), kind_key)
        kind = self.kinds.get(key) or _kinds.get(key)
        if kind is None:
            kind = _kinds[key] = CompiledKind(type(block).__name__, forward, settings, OptionsFilter(block))
        self.kinds[key] = kind
        return kind


# Two models of one architecture (Wan's high and low noise halves) use the same code; it lives as long as one of them.
_kinds: weakref.WeakValueDictionary[tuple, CompiledKind] = weakref.WeakValueDictionary()
_models: weakref.WeakKeyDictionary[nn.Module, ModelCode] = weakref.WeakKeyDictionary()


def code_of(model: nn.Module) -> ModelCode:
    """The compiled code that belongs to `model` (the module whose blocks are compiled)."""
    code = _models.get(model)
    if code is None:
        code = _models[model] = ModelCode()
    return code


def live_models() -> list[tuple[nn.Module, ModelCode]]:
    """All models with compiled code that are still in memory."""
    return list(_models.items())
