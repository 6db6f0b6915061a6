"""Remove from a block's `transformer_options` what changes on every call, and keep patches out of the block's graphs.

The host hands every block one dict in which it also keeps its own state: the current sigma, uuids of the conditions, the index
of the block. Dynamo guards on what the traced code reads, and on every entry if code loops over the dict, as the host's
`BasicTransformerBlock` does: each block and step would need its own graph. Hiding the dict from the guards (as core and other
packs do) makes patches that are added later silently ineffective. So:

1. Patches and overrides are never traced. They are called outside of the graphs (`outside.py`), with the host's own, complete
   options. Only the attention that this pack has chosen stays in the graph.
2. Blocks of the host get the entries whose keys the code inside the block names: the code reads no other entries.
3. If code of another pack in a block may be given the dict, the block gets the whole dict: such code may read anything.
"""

import dis
import inspect
import sys
import types
from collections.abc import Callable, Mapping

from torch import nn

from ..ownership import TRUSTED, forward_of_class, given_forward
from .code import NamedFunctions, codes_of
from .outside import HOLDER, OVERRIDE, HostOptions

PATCHES = ("patches", "patches_replace")
# Keys that the host's samplers and models write for patches to read, in ComfyUI 0.30 (samplers.py, ldm/*/model.py).
BOOKKEEPING = frozenset(
    {
        "wrappers", "callbacks", "sample_sigmas", "sigmas", "cond_or_uncond", "uuids", "prefetch_dynamic_vbars",
        "block", "block_index", "block_type", "total_blocks", "transformer_index", "grid_sizes", "img_slice",
        "activations_shape", "original_shape", "reference_image_num_tokens", "multigpu_thread_device", "easycache",
    }
)  # fmt: skip
# Keys that `write_back` does not copy: the filter may have given the block another value than the host's.
_NOT_WRITTEN = BOOKKEEPING.union(PATCHES, {OVERRIDE, HOLDER})
POSITION = frozenset({"block", "block_index", "block_type", "transformer_index"})
# The UNets' attention: it loops over the options, and uses POSITION only to look up replacements in `patches_replace`.
UNET_ATTENTION = "comfy.ldm.modules.attention"
# Names of the arguments through which code gets the options.
_BY_NAME = ("extra_options", "transformer_options")
# The host, and libraries that it calls with tensors alone: their code reads options only by literal keys.
_NO_PACKS = {"comfy", "comfy_extras"}.union(TRUSTED, sys.stdlib_module_names)


def keys_read(block: nn.Module, codes: Mapping[types.CodeType, dict] | None = None) -> frozenset[str]:
    """The bookkeeping keys that the code of `block` names; all of BOOKKEEPING if code of another pack may get the options.
    `codes`: the result of `codes_of` for all modules in the block."""
    for module in block.modules():
        replaced = given_forward(module) if module is not block else None
        for forward in (forward_of_class(type(module)), replaced):
            if forward is not None and not isinstance(forward, types.FunctionType | types.MethodType):
                return BOOKKEEPING  # a callable of another kind, which may read anything
    origins = {c: m.get("__name__", "") for c, m in (codes or codes_of(block, block.modules())).items()}
    beside_layers = codes_of(block, (module for module in block.modules() if module is block or not _is_layer(module)))
    foreign = [code for code, origin in origins.items() if origin.partition(".")[0] not in _NO_PACKS]
    if any(_may_read_options(code, code in beside_layers) for code in foreign):
        return BOOKKEEPING
    return frozenset(
        key
        for code, origin in origins.items()
        for key in _keys_in_code(code)
        if origin != UNET_ATTENTION or key not in POSITION
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether the class of `module` is, or is derived from, a layer of PyTorch's: these are called with tensors alone."""
    origins = [base.__module__ for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules.")]
    return not {"torch.nn.modules.module", "torch.nn.modules.container"}.issuperset(origins)


def _may_read_options(code: types.CodeType, in_rest: bool) -> bool:
    """Whether code uses a variable, key or attribute with one of the options' names (`_BY_NAME`); `in_rest`: also whether it
    uses `*args` or `**kwargs`, which may hold the options."""
    names = set(_BY_NAME)
    if in_rest and code.co_name != "__init__":
        rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        named = code.co_argcount + code.co_kwonlyargcount
        names.update(code.co_varnames[named : named + rest])
    used = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return any(not names.isdisjoint(values) for values in used)


def _keys_in_code(code: types.CodeType) -> set[str]:
    if BOOKKEEPING.isdisjoint(c for c in code.co_consts if isinstance(c, str)):
        return set()
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    following = [name for name, _ in steps[1:]] + [""]
    loaded = {
        value
        for (name, value), then in zip(steps, following, strict=True)
        # `options[key] = value` writes the key; it does not depend on it.
        if "CONST" in name and isinstance(value, str) and then != "STORE_SUBSCR"
    }
    return loaded & BOOKKEEPING


class OptionsFilter:
    """Give a block only the `transformer_options` that its code reads, with its patches wrapped; all of the options if code of
    another pack may read them (`is_whole`)."""

    def __init__(self, block: nn.Module):
        codes = codes_of(block, block.modules())
        self._named = NamedFunctions(codes)
        read = keys_read(block, codes)
        self.is_whole = read == BOOKKEEPING
        self._dropped = BOOKKEEPING - read
        self._strings = frozenset(c for code in codes for c in code.co_consts if isinstance(c, str))

    def is_current(self) -> bool:
        """Whether the block's code still names the same functions as when this filter was made."""
        return self._named.are_current()

    def __call__(self, options: dict) -> tuple[dict, list[str]]:
        """The dict to hand to the block, and the names of the patches that run inside it."""
        patches = self._inside(options.get("patches") or {})
        replacements = self._inside(options.get("patches_replace") or {})
        override = options.get(OVERRIDE)
        if override is not None and getattr(override, "reads_no_options", False):  # ours: attention_kernels.py
            override = None
        if self.is_whole and not patches and not replacements and override is None:
            return options, []
        # Guards tell an empty entry from an absent one, and see the order of the keys: always have these two, first.
        kept: dict = {"patches": {}, "patches_replace": {}}
        kept |= {k: v for k, v in options.items() if k not in self._dropped and k not in PATCHES}
        if self.is_whole:
            kept["patches_replace"] = replacements
        elif replacements:
            _add_replacements(kept, replacements, options, self._dropped)
        if not patches and not kept["patches_replace"] and override is None:
            return kept, []
        wrapped = HostOptions(options).put_into(kept, patches, override)
        return kept, list(dict.fromkeys(f"{name} {_name_of(patch)}" for name, patch in wrapped))

    def _inside(self, patches: Mapping) -> dict:
        """The patches of the kinds that the block's code looks for: patches of other kinds run outside of the block."""
        return {name: value for name, value in patches.items() if value and (self.is_whole or name in self._strings)}

    @staticmethod
    def write_back(original: dict, filtered: Mapping) -> None:
        """Copy what the block wrote for later blocks to the host's dict."""
        for key, value in filtered.items():
            if key not in _NOT_WRITTEN and original.get(key, original) is not value:
                original[key] = value


def _add_replacements(kept: dict, replacements: Mapping, options: Mapping, dropped: frozenset[str]) -> None:
    """Put into a block's options the replacements that the block looks up, and the keys of that lookup. If nothing else depends
    on a UNet block's place, all blocks get the same place, and share a graph."""
    block, position = options.get("block"), {k: options[k] for k in POSITION if k in options}
    if isinstance(block, list | tuple) and len(block) == 2 and replacements.keys() <= {"attn1", "attn2"}:
        here = there = tuple(block), (*block, options.get("block_index", 0))
        if dropped.issuperset(POSITION):  # without `block_index` the host looks for 0
            there, position = (_PLACE, (*_PLACE, 0)), {"block": _PLACE}
        tables = {
            name: {new: table[old] for old, new in zip(here, there, strict=True) if old in table}
            for name, table in replacements.items()
        }
        replacements = {name: table for name, table in tables.items() if table}
    if replacements:
        kept |= {"patches_replace": replacements, **position}


# The place that all blocks get which share a graph.
_PLACE = ("block", 0)


def _name_of(patch: Callable) -> str:
    named = patch if hasattr(patch, "__qualname__") else type(patch)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"
