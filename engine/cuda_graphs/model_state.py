"""Tell whether the weights are where a CUDA graph expects them, and whether layers still run the same functions."""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..blocks.state import methods_of
from ..compile.binding import is_ours
from ..ownership import is_of_class
from ..per_model import Same
from .keys import OF_THE_HOST, HeldValues, value_key

# Up to this size a weight is copied to the address that the graphs expect: under dynamic VRAM the host allocates small weights,
# and those of layers that it does not page, again for each run.
SMALL = 2**20
# Packages whose layers hold no state that a call changes.
_KNOWN_PACKAGES = ("torch", "comfy")


@dataclass
class ModelState:
    """The model as it was when the graphs were captured.

    Args:
        obstacle: why layers forbid replays in this sampling run, or None.
        functions: what the layers run in this sampling run.
    """

    device: torch.device | None = None
    obstacle: str | None = None
    functions: list | None = None
    _checked: bool = False
    _foreign: list[weakref.ref[nn.Module]] = field(default_factory=list)
    _held: Hashable = None
    _values: HeldValues = field(default_factory=HeldValues)
    _known: list | None = None
    _copies: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def new_run(self) -> None:
        """At the start of a sampling run: weights may have moved."""
        self._checked = False
        self.obstacle = self._held = None

    def held(self) -> Hashable:
        """A key of what layers hold beside weights; NoKey if changes of it cannot be seen.

        Some nodes set the step on layers of theirs before each call (DyPE): an obstacle.
        """
        foreign = [module for reference in self._foreign if (module := reference()) is not None]
        held = value_key([{k: v for k, v in vars(m).items() if not k.startswith("_") and k != "forward"} for m in foreign])
        if self._held is not None and held != self._held:
            self.obstacle = "a layer of another node changes from call to call"
        self._held = held
        return held, self._values.key()

    def forget(self) -> None:
        """Called when all graphs were dropped."""
        self._known = None
        self._copies.clear()

    def look_at(
        self, model: nn.Module, device: torch.device, places: Callable[[nn.Module], object] | None, forget: Callable[[], None]
    ) -> None:
        """Once a sampling run; `forget` is called if the model has changed.

        Args:
            places: gives where the host pages the weights of a layer, None for other layers. A host that pages weights
                allocates small ones again for each run; they are copied to where the graphs expect them.
        """
        if self._checked:
            return
        self._checked, self.device = True, device
        addresses: list[object] = [device]
        functions: list[object] = []
        copies: dict[tuple[str, str], torch.Tensor] = {}
        others, self._foreign = [], []
        for path, module in model.named_modules():
            if not (module._parameters or module._buffers) and type(module).__module__.partition(".")[0] not in _KNOWN_PACKAGES:
                self._foreign.append(weakref.ref(module))
            else:
                others.append(module)
            place = places(module) if places is not None else None
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or tensor.is_meta or place is not None:
                        continue
                    if tensor.device.type != device.type:
                        self.obstacle = self.obstacle or "a layer's weights are elsewhere"
                    if places is not None and tensor.nbytes <= SMALL and type(tensor) in (torch.Tensor, nn.Parameter):
                        tensor = copies[path, name] = _replaced(table, name, tensor, self._copies.get((path, name)))
                    addresses += _addresses(tensor)
            addresses += [Same(module), place]
            functions += [*methods_of([type(module)]), *functions_of(module)]
            addresses += [*module._forward_hooks, *module._forward_pre_hooks]  # the numbers of their handles
            if module._forward_hooks or module._forward_pre_hooks:
                self.obstacle = "a layer has a forward hook"
        self.functions = functions
        if not self._values.are_of(others):  # to list their values takes 20 times as long as to look at them
            self._values = HeldValues(others)
        now = addresses + functions
        if self._known != now:
            forget()
            self._known, self._copies = now, copies


def functions_of(module: nn.Module) -> list[tuple[str, Same, Same]]:
    """What other nodes have put in the module's `__dict__` that can be called: (name, function, `self` of the method)."""
    return [
        (name, Same(getattr(value, "__func__", value)), Same(getattr(value, "__self__", None)))
        for name, value in module.__dict__.items()
        if callable(value) and name not in OF_THE_HOST and not is_ours(value) and not is_of_class(module, name, value)
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


def _addresses(tensor: torch.Tensor) -> list[object]:
    """The addresses of a tensor's data, or of its parts if it is quantised. Tensors of GGUF may also hold a LoRA."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return [tensor.data_ptr()]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.data_ptr(), *map(_identity, vars(tensor).values())]
    return [address for name in tensor.__tensor_flatten__()[0] for address in _addresses(getattr(tensor, name))]


def _identity(value: object) -> object:
    return tuple(map(_identity, value)) if isinstance(value, list | tuple) else Same(value)
