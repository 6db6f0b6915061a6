"""A block and the arguments of a call without their data: all that compiling looks at, in little memory.

The thread that compiles must not hold weights, nor touch a block whose weights another thread moves. So it gets a copy of the
block's tree, whose tensors have shapes, strides and kinds of the real ones, and one storage for all weights. Arguments have one
each: a block may work in place on them, and PyTorch compiles differently for what then shares memory. Functions among them are
copied with what they close over: the model's forward may go on to change its variables.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..closures import is_filled

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class _Form:
    """What guards know of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    inference: bool
    parameter: bool
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_inference(),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
        )

    @property
    def nbytes(self) -> int:
        if 0 in self.shape:
            return 0
        return (1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    def made_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        with torch.inference_mode(self.inference):
            tensor = torch.empty(0, dtype=self.dtype, device=self.device)
            tensor.set_(storage, 0, self.shape, self.stride)
            return nn.Parameter(tensor, self.requires_grad) if self.parameter else tensor.requires_grad_(self.requires_grad)


class StandIn:
    """The forms of a call of a block; `made` gives one that can be compiled for.

    Args:
        block: as its forward would see it now, weights in place.
        args, kwargs: of the call.

    `again`: there has been code for such a call before, see `BlockCode.call`.
    """

    def __init__(self, block: nn.Module, args: tuple, kwargs: dict):
        self.again = False
        self._forms: dict[int, _Form | torch.Tensor] = {}  # by `id`: the caller keeps all of them until we are done here
        self._functions: dict[int, _Function] = {}  # likewise
        self._attributes: set[int] = set()  # of the forms: tensors that are no weights, which a block may write into
        self._block = self._without_data(block, {})
        self._weights = set(self._forms) - self._attributes
        self._call = pytree.tree_map(self._form, (args, kwargs))

    @property
    def device(self) -> torch.device:
        """Where the first tensor of the call is; the CPU if there is none."""
        return next((f.device for f in self._forms.values()), torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Of the memory that `made` takes, on the device."""
        forms = {key: form for key, form in self._forms.items() if isinstance(form, _Form)}
        largest = max((forms[key].nbytes for key in forms.keys() & self._weights), default=0)
        return largest + sum(forms[key].nbytes for key in forms.keys() - self._weights)

    def made(self) -> tuple[nn.Module, tuple, dict]:
        """The block and the arguments, with tensors of zeros.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        forms = {key: form for key, form in self._forms.items() if isinstance(form, _Form)}
        sizes: dict[torch.device, int] = {}
        for key in forms.keys() & self._weights:
            sizes[forms[key].device] = max(sizes.get(forms[key].device, 0), forms[key].nbytes)
        shared = {device: _zeros(size, device) for device, size in sizes.items()}
        self._made = {
            **self._forms,
            **{key: forms[key].made_in(shared[forms[key].device]) for key in forms.keys() & self._weights},
            **{key: forms[key].made_in(_zeros(forms[key].nbytes, forms[key].device)) for key in forms.keys() - self._weights},
        }
        self._fill(self._block)
        self._own = {id(tensor) for tensor in self._made.values()}
        for module in self._block.modules():  # filled by an attempt before this one
            for table in (module.__dict__, module._parameters, module._buffers):
                self._own |= {id(value) for value in table.values() if isinstance(value, torch.Tensor)}
        self._made_functions: dict[int, types.FunctionType] = {}
        args, kwargs = pytree.tree_map(self._tensor, self._call)
        return self._block, args, kwargs

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `made` has made it: what objects among the arguments hold is the caller's."""
        return id(tensor) in self._own

    def _form(self, leaf: object) -> object:
        """A mark in the place of a tensor; one object stays one object."""
        if isinstance(leaf, types.FunctionType) and _is_made_in_a_call(leaf):
            return self._without_variables(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._forms:
            plain = type(leaf) in _PLAIN and leaf.layout is torch.strided and not leaf.is_nested
            self._forms[id(leaf)] = _Form.of(leaf) if plain else _copied(leaf)
        return _Mark(id(leaf))

    def _tensor(self, leaf: object) -> object:
        if isinstance(leaf, _Function):
            return self._with_variables(leaf)
        return self._made[leaf.key] if isinstance(leaf, _Mark) else leaf

    def _without_variables(self, function: types.FunctionType) -> _Function:
        if id(function) not in self._functions:  # functions may close over each other
            found = self._functions[id(function)] = _Function(_copied_function(function), {})
            filled = {i: cell.cell_contents for i, cell in enumerate(function.__closure__ or ()) if is_filled(cell)}
            found.variables.update(pytree.tree_map(self._form, filled))
        return self._functions[id(function)]

    def _with_variables(self, mark: _Function) -> types.FunctionType:
        if id(mark) not in self._made_functions:
            made = self._made_functions[id(mark)] = _copied_function(mark.function)
            for i, value in pytree.tree_map(self._tensor, mark.variables).items():
                (made.__closure__ or ())[i].cell_contents = value
        return self._made_functions[id(mark)]

    def _without_data(self, module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
        if id(module) in known:
            return known[id(module)]
        cls: Any = type(module)
        other = known[id(module)] = cls.__new__(cls)
        entries = dict(module.__dict__)
        for table in ("_parameters", "_buffers"):
            entries[table] = {name: self._form(tensor) for name, tensor in entries[table].items()}
        entries["_modules"] = {
            name: None if child is None else self._without_data(child, known) for name, child in module._modules.items()
        }
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                if id(value) not in self._forms:
                    self._attributes.add(id(value))
                entries[name] = self._form(value)
        forward = entries.get("forward")
        if isinstance(forward, types.MethodType) and forward.__self__ is module:
            entries["forward"] = types.MethodType(forward.__func__, other)
        elif isinstance(forward, functools.partial):  # our own, see binding
            del entries["forward"]
        other.__dict__.update(entries)
        return other

    def _fill(self, block: nn.Module) -> None:
        for module in block.modules():
            for table in (module.__dict__, module._parameters, module._buffers):
                for name, mark in table.items():
                    if isinstance(mark, _Mark):
                        table[name] = self._tensor(mark)


def _zeros(size: int, device: torch.device) -> torch.UntypedStorage:
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another class (quantised): what it is made of is its own affair."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _is_made_in_a_call(function: types.FunctionType) -> bool:
    """Others are known by what they are; decorated ones close over variables too."""
    ours = not (function.__module__ or "").startswith("torch.")
    return ours and bool(function.__closure__) and "<locals>" in function.__qualname__


def _copied_function(function: types.FunctionType) -> types.FunctionType:
    """With the same code, by which guards know it, and none of its variables set."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


@dataclass(frozen=True, eq=False)
class _Function:
    """Stands where a function was that closes over variables.

    Args:
        function: with none of them set.
        variables: those that are set, by number.
    """

    function: types.FunctionType
    variables: dict[int, object]


@dataclass(frozen=True)
class _Mark:
    """Stands where a tensor was; equal for one and the same."""

    key: int
