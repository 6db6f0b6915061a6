"""Give compiled blocks a `transformer_options` without what changes on every call.

The host hands every block one dict in which it also keeps its own books: the current sigma, uuids of the conditions, the index
of the block. Guards on those recompile for each block or step. Hiding the dict from the guards (as core and other packs do)
makes patches that are added later silently ineffective, so the entries are removed instead, and only those that the block's
code does not read and no patch can see.
"""

from __future__ import annotations

import dis
import logging
import types
from collections.abc import Iterator, Mapping

from torch import nn

from ..closures import contents_of
from ..forwards import given_forward
from .call_flow import Flow
from .patch_lookups import PATCHES, read_elsewhere
from .patches import OVERRIDE, keys_of_patch
from .uses_of_options import Lost

logger = logging.getLogger("torch-compile-kit")
# Written by the host's samplers and models for patches to read; see research of ComfyUI 0.30 (samplers.py, ldm/*/model.py).
BOOKKEEPING = frozenset(
    {
        "wrappers", "callbacks", "sample_sigmas", "sigmas", "cond_or_uncond", "uuids", "prefetch_dynamic_vbars",
        "block", "block_index", "block_type", "total_blocks", "transformer_index", "grid_sizes", "img_slice",
        "activations_shape", "original_shape", "reference_image_num_tokens", "multigpu_thread_device", "easycache",
    }
)  # fmt: skip
# Say where a block stands.
POSITION = frozenset({"block", "block_index", "block_type", "transformer_index"})
# Patches that models call outside their blocks (ldm/*/model.py, openaimodel.py).
AROUND_BLOCKS = frozenset(
    {
        "input_block_patch", "input_block_patch_after_skip", "middle_block_after_patch", "output_block_patch", "emb_patch",
        "forward_timestep_embed_patch", "double_block", "single_block", "post_input", "noise_refiner",
    }
)  # fmt: skip


def keys_read(block: nn.Module) -> frozenset[str]:
    """The bookkeeping keys that the code of `block` names and so may depend on.

    Looks through the methods of its class and of the classes below it, the functions they name, and all that they hand the
    options to (`options/call_flow.py`): if that cannot be told, anything may be read. A position key that only looks up a
    replacement patch does not count (`options/patch_lookups.py`).
    """
    for module in block.modules():
        found = given_forward(module) if module is not block else None
        if found is not None and not isinstance(found, types.FunctionType | types.MethodType):
            return BOOKKEEPING  # a callable of another kind, which may read anything
    flow = Flow()
    try:
        flow.follow(block)
    except Lost as lost:
        logger.debug("%s reads any option: %s", type(block).__name__, lost)
        return BOOKKEEPING
    read = {key for code in _codes_of_block(block) | flow.codes for key in _keys_in_code(code)}
    return frozenset(read | BOOKKEEPING.intersection(flow.names))


def strings_in(block: nn.Module) -> frozenset[str]:
    """All string literals in the code that `keys_read` looks at."""
    return frozenset(c for code in _codes_of_block(block) for c in code.co_consts if isinstance(c, str))


def _codes_of_block(block: nn.Module) -> set[types.CodeType]:
    seen: set[types.CodeType] = set()
    for function in _forwards_given_to(block):
        _add_codes(function, seen, depth=4)
    for cls in {type(m) for m in block.modules()}:
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
                continue
            for member in vars(base).values():
                member = getattr(member, "__func__", member)
                if isinstance(member, types.FunctionType):
                    _add_codes(member, seen, depth=4)
    return seen


def _forwards_given_to(block: nn.Module) -> Iterator[types.FunctionType]:
    """The functions that stand in for the forward of single modules inside the block."""
    for module in block.modules():
        found = given_forward(module) if module is not block else None
        function = getattr(found, "__func__", found)
        if isinstance(function, types.FunctionType):
            yield function
        if isinstance(found, types.MethodType):
            yield from (member for member in vars(type(found.__self__)).values() if isinstance(member, types.FunctionType))


def _add_codes(function: types.FunctionType, seen: set[types.CodeType], depth: int) -> None:
    for code in _codes(function.__code__):
        if code in seen:
            continue
        seen.add(code)
        if depth:
            for target in [*(function.__globals__.get(name) for name in code.co_names), *contents_of(function)]:
                if isinstance(target, types.FunctionType) and not (target.__module__ or "").startswith("torch"):
                    _add_codes(target, seen, depth - 1)


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
    places = read & POSITION
    if places and "patches_replace" in code.co_consts:
        read = read - POSITION | read_elsewhere(code, places)
    return read


class OptionsFilter:
    """Removes from `transformer_options` what a block class and the patches in it do not read.

    Args:
        block: any block of the class.
    """

    def __init__(self, block: nn.Module):
        self.dropped = BOOKKEEPING - keys_read(block)
        self.around = AROUND_BLOCKS - strings_in(block)

    def __call__(self, options: Mapping) -> tuple[Mapping, tuple[str, ...]]:
        """The dict to hand to the block, and the names of the patches that run inside it.

        With a patch whose code cannot be told apart from one that reads everything, it is the host's own dict, complete.
        """
        patches = {name: value for name, value in (options.get("patches") or {}).items() if value and name not in self.around}
        replacements = _replacements_for(options)
        override = options.get(OVERRIDE)
        inside = [
            (name, patch) for name, value in patches.items() for patch in (value if isinstance(value, list) else (value,))
        ]
        inside += [(name, patch) for name, entries in replacements.items() for patch in entries.values()]
        if override is not None and not getattr(override, "reads_no_options", False):
            inside.append((OVERRIDE, override))
        # Present and empty is one state, absent another, and guards see the order: settle on one.
        settled: dict = {"patches": patches, "patches_replace": replacements}
        if not inside:
            return settled | {k: v for k, v in options.items() if k not in self.dropped and k not in PATCHES}, ()
        names = tuple(dict.fromkeys(f"{name} {_name_of(patch)}" for name, patch in inside))
        read: set[str] = set()
        for name, patch in inside:
            keys = keys_of_patch(name, patch)
            if keys is None or keys.intersection(PATCHES):
                return options, names
            read |= keys
        dropped = self.dropped - read
        kept = settled | {k: v for k, v in options.items() if k not in dropped and k not in PATCHES}
        if replacements:
            _add_position(kept, options, dropped)
        return kept, names

    @staticmethod
    def write_back(original: dict, given: Mapping) -> None:
        """Carry what the block wrote for later blocks back into the host's dict."""
        for key, value in given.items():
            if key not in BOOKKEEPING and key not in PATCHES and original.get(key, original) is not value:
                original[key] = value


def _replacements_for(options: Mapping) -> dict[str, dict]:
    """The replacements inside the block that `options` places, by kind; those of other blocks are not looked up by it."""
    here = _place(options)
    found = {}
    for name, entries in (options.get("patches_replace") or {}).items():
        if name == "dit":  # wraps the block from outside (ldm/*/model.py) and never reaches into it
            continue
        if here is not None and name in ("attn1", "attn2"):
            entries = {k: v for k, v in entries.items() if not _is_place(k) or tuple(k[:2]) == here}
        if entries:
            found[name] = entries
    return found


def _add_position(kept: dict, options: Mapping, dropped: frozenset[str]) -> None:
    """Let the block find its replacements: under one place for all, where nothing but the lookup depends on it."""
    tables = kept["patches_replace"]
    here = _place(options)
    if here is None or not dropped.issuperset(POSITION) or any(not _is_place(k) for t in tables.values() for k in t):
        kept.update({k: options[k] for k in POSITION if k in options})
        return
    kept["block"] = ("block", 0)
    kept["patches_replace"] = {name: {("block", 0, *k[2:]): v for k, v in t.items()} for name, t in tables.items()}
    if "block_index" in options and any(len(k) == 3 for t in tables.values() for k in t):
        kept["block_index"] = options["block_index"]


def _place(options: Mapping) -> tuple | None:
    block = options.get("block")
    return tuple(block[:2]) if isinstance(block, list | tuple) and len(block) >= 2 else None


def _is_place(key: object) -> bool:
    return isinstance(key, tuple) and len(key) in (2, 3)


def _name_of(patch: object) -> str:
    named = patch if hasattr(patch, "__qualname__") else type(patch)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"
