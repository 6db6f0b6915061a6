"""Detect whether a model has changed since its CUDA graphs were captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..ownership import GLOBAL_HOOKS, address_of, addresses_in, is_ours, survey_of
from ..per_model import Same

# A weight up to this size is copied to the address that the graphs expect: under dynamic VRAM the host allocates small weights,
# and weights of layers that are not paged, again for each run.
SMALL = 2**20
# The most checks of a whole model in one run: LoRA that change within the run move weights a few times, but some models change
# in each call, since they keep tensors of the call (Cosmos-Predict2) or are given other weights.
MOST_LOOKS = 8


@dataclass
class ModelState:
    """The state of a model at the capture of its graphs. Replays in this sampling run are forbidden by `obstacle`, a reason, or
    `foreign`, the first pack whose code is in the network. `functions`: those that the layers run. `lora_looked_at`: LoRA of
    packed weights have been copied in this run, if possible."""

    device: torch.device | None = None
    obstacle: str | None = None
    foreign: str | None = None
    functions: list | None = None
    lora_looked_at: bool = False
    _glance: _Glance | None = None
    _known: list | None = None
    _looks: int = 0
    _copies: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def new_run(self) -> None:
        """Called when a sampling run starts and ends: weights may have moved, and `_Glance` holds references to layers."""
        self._glance = self.obstacle = self.foreign = None
        self._looks, self.lora_looked_at = 0, False

    def forget(self) -> None:
        self._known = self._glance = None
        self._copies.clear()

    def check_unchanged(
        self, model: nn.Module, device: torch.device, places: Callable[[nn.Module], object] | None, forget: Callable[[], None]
    ) -> None:
        """Called before each call. Checks the whole model once a sampling run, and again if `_Glance` shows a change; calls
        `forget` if the model has changed. `places`: returns where the pages of a layer are, None for a layer without pages.
        """
        if self.foreign is not None or self._looks > MOST_LOOKS:
            return
        if self._glance is not None and self._glance.shows_no_change():
            return
        self._looks += 1
        if self._looks > MOST_LOOKS:
            self.obstacle = "the model, or its weights, changes in each call"
            return
        named = [*model.named_modules()]
        modules = [module for _, module in named]
        self.device, survey = device, survey_of(modules)
        self.foreign = survey.pack
        if self.foreign is not None:  # the graphs are kept for a run without that code
            return
        now: list[Hashable] = [device, *survey.values]
        copies: dict[tuple[str, str], torch.Tensor] = {}
        for path, module in named:
            place = places(module) if places is not None else None
            now += [path, Same(module), place]
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or tensor.is_meta or place is not None:
                        continue
                    if tensor.device.type != device.type:
                        self.obstacle = self.obstacle or "a layer's weights are elsewhere"
                    if places is not None and tensor.nbytes <= SMALL and type(tensor) in (torch.Tensor, nn.Parameter):
                        tensor = copies[path, name] = _replaced(table, name, tensor, self._copies.get((path, name)))
                    now.append(address_of(tensor))
        functions = [value for value in survey.values if isinstance(value, Same)]
        if functions != self.functions:  # else keep the list: host/graphs/replay.py compares it by identity
            self.functions = functions
        if self._known != now:
            forget()
            self._known, self._copies = now, copies
        self._glance = _Glance(modules, survey.tensors)


class _Glance:
    """Detect cheaply whether a network may have changed, by identities of modules and weights, the number of attributes of each
    module, hooks, callables set on the network itself, and addresses of tensors that are not weights."""

    def __init__(self, modules: list[nn.Module], tensors: list[tuple[Callable, str]]):
        self._own, *self._entries = dicts = [*map(vars, modules)]  # the network's own first
        tables = [entries[name] for entries in dicts for name in ("_modules", "_parameters", "_buffers")]
        self._tables = [table for table in tables if table and isinstance(table, dict)]  # `torch.jit` has other types
        self._empty = [table for table in tables if not table and isinstance(table, dict)]
        self._hooks = [entries[name] for entries in dicts for name in ("_forward_hooks", "_forward_pre_hooks")] + GLOBAL_HOOKS
        self._tensors = tensors
        self._handles, self._count = RemovableHandle.next_id, sum(map(len, self._hooks))
        self._seen = self._look()

    def shows_no_change(self) -> bool:
        before, self._handles = self._handles, RemovableHandle.next_id  # `next_id` counts all hooks of the process
        if before != self._handles and sum(map(len, self._hooks)) != self._count:
            return False
        return self._look() == self._seen

    def _look(self) -> list:
        return [
            *map(len, self._entries),
            sum(map(len, self._empty)),
            *map(id, itertools.chain.from_iterable(map(dict.values, self._tables))),
            *(name for name, value in [*self._own.items()] if callable(value) and not is_ours(value)),
            *(address for owner, name in self._tensors for address in addresses_in(getattr(owner(), name, None))),
        ]


def _replaced(table: dict, name: str, tensor: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    """Replace the tensor by a copy, into which later runs copy: the tensor itself may be the one that the host restores."""
    with torch.inference_mode(tensor.is_inference()):  # guards distinguish inference tensors from others
        if copy is None or _layout(copy) != _layout(tensor):
            copy = tensor.detach().clone()
        elif copy.data_ptr() != tensor.data_ptr():
            copy.copy_(tensor)
        table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
    return copy


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()
