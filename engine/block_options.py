"""Give compiled blocks a `transformer_options` without what changes on every call.

The host hands every block one dict in which it also keeps its own books: the current sigma, uuids of the conditions, the index
of the block. Guards on those recompile for each block or step. Hiding the dict from the guards (as core and other packs do)
makes patches that are added later silently ineffective, so the entries are removed instead, and only those that the block's
code does not read and no patch can see.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Mapping

from torch import nn

# Written by the host's samplers and models for patches to read; see research of ComfyUI 0.30 (samplers.py, ldm/*/model.py).
BOOKKEEPING = frozenset(
    {
        "wrappers", "callbacks", "sample_sigmas", "sigmas", "cond_or_uncond", "uuids", "prefetch_dynamic_vbars",
        "block", "block_index", "block_type", "total_blocks", "transformer_index", "grid_sizes", "img_slice",
        "activations_shape", "original_shape", "reference_image_num_tokens",
    }
)  # fmt: skip
# Say where a block stands; blocks read them to look up a replacement patch, which matters only when there is one.
POSITION = frozenset({"block", "block_index", "block_type", "transformer_index"})
PATCHES = ("patches", "patches_replace")


def keys_read(block: nn.Module) -> frozenset[str]:
    """The bookkeeping keys that the code of `block` names and so may depend on.

    Looks through the methods of its class and of the classes below it, and the functions they name. A position key named
    next to `patches_replace` is a patch lookup and does not count.
    """
    found: set[str] = set()
    seen: set[types.CodeType] = set()
    for cls in {type(m) for m in block.modules()}:
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
                continue
            for member in vars(base).values():
                member = getattr(member, "__func__", member)
                if isinstance(member, types.FunctionType):
                    found |= _keys_in_function(member, seen, depth=4)
    return frozenset(found)


def _keys_in_function(function: types.FunctionType, seen: set, depth: int) -> set[str]:
    found: set[str] = set()
    for code in _codes(function.__code__):
        if code in seen:
            continue
        seen.add(code)
        found |= _keys_in_code(code)
        if depth:
            for name in code.co_names:
                target = function.__globals__.get(name)
                if isinstance(target, types.FunctionType) and not (target.__module__ or "").startswith("torch"):
                    found |= _keys_in_function(target, seen, depth - 1)
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _keys_in_code(code: types.CodeType) -> set[str]:
    named = BOOKKEEPING.intersection(c for c in code.co_consts if isinstance(c, str))
    if not named:
        return set()
    instructions = list(dis.get_instructions(code))
    read = {
        this.argval
        for this, following in zip(instructions, [*instructions[1:], None], strict=True)
        if this.argval.__class__ is str
        and this.argval in named
        # `options[key] = value` writes the key; it does not depend on it.
        and not (following is not None and following.opname == "STORE_SUBSCR")
        and "CONST" in this.opname
    }
    if "patches_replace" in code.co_consts:
        read -= POSITION
    return read


class OptionsFilter:
    """Removes from `transformer_options` what a block class does not read.

    Args:
        block: any block of the class.
    """

    def __init__(self, block: nn.Module):
        self.dropped = BOOKKEEPING - keys_read(block)

    def __call__(self, options: Mapping) -> tuple[Mapping, bool]:
        """The dict to hand to the block, and whether patches are present (then it is the host's own, complete)."""
        for name in PATCHES:
            if _holds_patches(options.get(name), name):
                return options, True
        kept = {k: v for k, v in options.items() if k not in self.dropped}
        # Present and empty is one state, absent another: settle on one, so that guards on presence do not differ.
        for name in PATCHES:
            kept[name] = {}
        return kept, False

    @staticmethod
    def write_back(original: dict, given: Mapping) -> None:
        """Carry what the block wrote for later blocks back into the host's dict."""
        for key, value in given.items():
            if key not in BOOKKEEPING and key not in PATCHES and original.get(key, original) is not value:
                original[key] = value


def _holds_patches(value: Mapping | None, name: str) -> bool:
    if not value:
        return False
    # `dit` replacements wrap the block from outside (ldm/*/model.py) and never reach into it.
    return any(bool(v) for k, v in value.items() if not (name == "patches_replace" and k == "dit"))
