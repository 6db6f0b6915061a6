"""Guards of Dynamo, with a text of them that holds in any process."""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections.abc import Mapping, Sequence

import torch
from torch._dynamo.guards import CheckFunctionManager

from .identities import Unnamed, name_of

# What a guard compares by something that neither its text nor a name shows.
_HIDDEN = ("__dtensor_spec_", "___check_opaque_guard_fn_", "___dict_version(", "compare_functorch_state")
_ADDRESS = re.compile(r"(check_(?:obj|type)_id\(.*?, )(\d+)(\))")
_SINGLETONS = {id(value): value for value in (None, True, False, ..., NotImplemented)}
_METADATA = re.compile(r"___check_metadata_\d+_c\S+")
# Where an object lies in memory or in which file, in how Python shows it.
_PLACE = re.compile(r" at 0x[0-9a-f]+|, file \"[^\"]*\", line \d+|(?<=') from '[^']*'(?=>)")
# What PyTorch writes behind a guard: where in the source it comes from, and advice.
_ORIGIN = re.compile(r"(\s+# ((.*# )?\S+:\d+ in \S+|<unknown>))?(\s+\(HINT: .*\))?$")


class BuiltGuards(CheckFunctionManager):
    """Guards as PyTorch makes them, with all that they compare as text, and names in place of addresses.

    `text` is None where something has no name, and `unnamed` tells it; `named` are the objects that have been named, with their
    names by their addresses, and `sorted` the guards in their order. Arguments: as of `CheckFunctionManager`, with
    `save_guards=True`.
    """

    text: str | None = None
    unnamed: str = ""
    sorted: Sequence = ()
    named: Mapping[int, tuple[object, str]] = types.MappingProxyType({})

    def serialize_guards(self, builder: object, sorted_guards: list, output_graph: object) -> bytes:
        """Called at the end of the making of the guards, while all that they compare is at hand."""
        self.sorted, self.named = sorted_guards, {}
        try:
            self.text = "\n".join([self._as_text(), *dict.fromkeys(_metadata(builder, guard) for guard in sorted_guards)])
        except Exception as error:  # the guards themselves are made
            self.unnamed = f"{type(error).__name__}: {error}"
        return b""

    def release(self) -> None:
        """Forget what was only needed to compare: PyTorch keeps the object for as long as the classes live that it guards."""
        self.text, self.sorted, self.named, self.shape_code_parts = None, (), {}, None

    def digest(self, builtins: str | None) -> str | None:
        """Of the text.

        Args:
            builtins: global name of the dict of builtins, which PyTorch numbers anew in each process.
        """
        if self.text is None:
            return None
        text = self.text.replace(builtins, "__builtins_dict__") if builtins else self.text
        return hashlib.sha256(text.encode()).hexdigest()

    def _as_text(self) -> str:
        text = "\n".join(_ORIGIN.sub("", line).rstrip() for line in str(self.guard_manager).splitlines())
        hidden = [sign for sign in _HIDDEN if sign in text]
        if hidden:
            raise Unnamed(hidden[0])
        return _PLACE.sub("", _METADATA.sub("metadata", _ADDRESS.sub(self._named, text)))

    def _named(self, match: re.Match) -> str:
        address = int(match[2])
        reference = self._weakrefs.get(address)
        value = _SINGLETONS.get(address) if reference is None else reference()
        if id(value) != address:
            raise Unnamed(match[0])
        if address not in self.named:
            self.named[address] = value, name_of(value)
        return f"{match[1]}{self.named[address][1]}{match[3]}"


def _metadata(builder: object, guard: object) -> str:
    """What a guard of a tensor subclass (a quantized weight) compares, which its text does not show; empty for others."""
    if guard.create_fn_name() != "TENSOR_SUBCLASS_METADATA_MATCH":
        return ""
    value = builder.get(guard)
    package = sys.modules.get(type(value).__module__.partition(".")[0])
    return f"{guard.name} {getattr(package, '__version__', '')} {_plainly(value.__tensor_flatten__()[1])}"


def _plainly(value: object) -> str:
    if isinstance(value, dict):
        return str({_plainly(key): _plainly(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return str([_plainly(part) for part in value])
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    return name_of(value)
