"""Tell whether a model is as it was when its CUDA graphs were captured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..ownership import GLOBAL_HOOKS, address_of, addresses_in, is_ours, survey_of
from ..per_model import Same

# Up to this size a weight is copied to the address that the graphs expect: under dynamic VRAM the host allocates small weights,
# and those of layers that it does not page, again for each run.
SMALL = 2**20
# How often a model is looked at in a run: LoRA that change within the run move weights a few times, but some models change in
# each call, since they keep its tensors (Cosmos-Predict2) or are given other weights.
MOST_LOOKS = 8


@dataclass
class ModelState:
    """The model as it was when the graphs were captured, and what of it forbids replays in this sampling run: `obstacle`, or
    `foreign`, the first pack whose code is in the network. `functions`: what the layers run. `lora_looked_at`: LoRA of packed
    weights have been copied in this run, if they can be."""

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
        """Called when a sampling run starts and ends: weights may have moved, and the glance holds references to layers."""
        self._glance = self.obstacle = self.foreign = None
        self._looks, self.lora_looked_at = 0, False

    def forget(self) -> None:
        self._known = self._glance = None
        self._copies.clear()

    def check_unchanged(
        self, model: nn.Module, device: torch.device, places: Callable[[nn.Module], object] | None, forget: Callable[[], None]
    ) -> None:
        """Called before each call. Looks at the whole model once a sampling run, and again if the glance shows a change; calls
        `forget` if the model has changed. `places`: gives where the host pages the weights of a layer, None for other layers.
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
        if self.foreign is not None:  # graphs are for a later run without that code
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
        if functions != self.functions:  # else the same list, so that nobody compares its elements again
            self.functions = functions
        if self._known != now:
            forget()
            self._known, self._copies = now, copies
        self._glance = _Glance(modules, survey.tensors)


class _Glance:
    """Tell at little cost whether a network may have changed, by its modules and weights, how many attributes each module has,
    hooks, callables set on the network itself, and tensors beside weights."""

    def __init__(self, modules: list[nn.Module], tensors: list[tuple[Callable, str]]):
        self._own, *self._entries = dicts = [*map(vars, modules)]  # the network's own first
        tables = [entries[name] for entries in dicts for name in ("_modules", "_parameters", "_buffers")]
        self._tables = [table for table in tables if table and isinstance(table, dict)]  # those of `torch.jit` are none
        self._empty = [table for table in tables if not table and isinstance(table, dict)]
        self._hooks = [entries[name] for entries in dicts for name in ("_forward_hooks", "_forward_pre_hooks")] + GLOBAL_HOOKS
        self._tensors = tensors
        self._handles, self._count = RemovableHandle.next_id, sum(map(len, self._hooks))
        self._seen = self._look()

    def shows_no_change(self) -> bool:
        before, self._handles = self._handles, RemovableHandle.next_id  # counts the hooks of the process
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
    """Put a copy in the tensor's place, since the tensor may be the one that the host restores."""
    with torch.inference_mode(tensor.is_inference()):  # compiled code tells inference tensors from others
        if copy is None or _layout(copy) != _layout(tensor):
            copy = tensor.detach().clone()
        elif copy.data_ptr() != tensor.data_ptr():
            copy.copy_(tensor)
        table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
    return copy


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()
