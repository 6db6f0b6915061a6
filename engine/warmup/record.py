"""Remember what has been warmed up, so that the same thing is not run again.

A warmup is described by everything that compiled code could depend on. What cannot be told apart by content is told apart by
identity, so that a doubt costs a run and never a compilation later.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Protocol

import torch

from ..identity import Same


class Compiled(Protocol):
    """Blocks that share compiled code, see `compile/group.py`."""

    def variants(self) -> list[object] | None: ...


_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


def describe(value: object, special: Callable[[object], object | None] = lambda _: None) -> Hashable:
    """What of `value` compiled code could depend on: shapes of tensors, not their numbers; other objects by identity.

    Args:
        special: gives the describable parts of an object of a class that it knows, else None.
    """
    inner = functools.partial(describe, special=special)
    if isinstance(value, _PLAIN):
        return type(value).__qualname__, value
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return "tensor", tuple(value.shape), value.dtype, value.device, value.is_contiguous()
    if isinstance(value, Mapping):
        return "mapping", tuple((inner(k), inner(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(inner, value))
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(inner, value))
    if isinstance(value, types.MethodType):  # a new object at each access
        return "method", Same(value.__self__), Same(value.__func__)
    parts = special(value)
    return Same(value) if parts is None else (type(value), inner(parts))


def torch_state() -> tuple:
    """Settings of PyTorch that all compiled code depends on (torch/_dynamo/guards.py, global state)."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.is_autocast_enabled(),
    )


class WarmRecord:
    """The warmups of one model, each with the compiled code there was when it ended."""

    def __init__(self) -> None:
        self._ran: dict[Hashable, frozenset[Same]] = {}

    def __len__(self) -> int:
        return len(self._ran)

    def add(self, what: Hashable, groups: Iterable[Compiled]) -> None:
        """Note that `what` has run to its end; `groups` are the compiled code it may have used."""
        variants = _variants(groups)
        if variants is not None:
            self._ran[what] = variants

    def holds(self, what: Hashable, groups: Iterable[Compiled]) -> bool:
        """Whether `what` has run, and PyTorch still has all the code of then."""
        before, now = self._ran.get(what), _variants(groups)
        return before is not None and now is not None and before <= now


def _variants(groups: Iterable[Compiled]) -> frozenset[Same] | None:
    found = [group.variants() for group in groups]
    known = [codes for codes in found if codes is not None]
    return frozenset(Same(code) for codes in known for code in codes) if len(known) == len(found) else None
