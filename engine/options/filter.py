"""Remove from a block's `transformer_options` what changes on every call and what the block does not read.

The host hands every block one dict in which it also keeps its own books: the current sigma, uuids of the conditions, the index
of the block. Dynamo guards on what the traced code reads, and on every entry where code loops over the dict, as the host's
`BasicTransformerBlock` does: a graph for each block and step. Hiding the dict from the guards (as core and other packs do)
makes patches that are added later silently ineffective. Here entries are removed, under these rules:

1. Blocks of the host get what some code inside the block names: what it does not name it does not read.
2. Blocks with code of other packs that may be given the dict get the host's own dict: such code may read anything.
3. A patch inside a block gets what its code looks up (`options/patches.py`), or the host's own dict where that cannot be told.
4. Objects in the place of attention of which that cannot be told, and functions in its place for which blocks would be traced
   again and again, are called outside of the graphs (`options/outside.py`), with the host's own dict. Not so lists of patches:
   the host calls them in loops, and Dynamo compiles no frame with a break in a loop.
"""

import dis
import inspect
import sys
import types
from collections.abc import Container, Mapping

from torch import nn

from ..forwards import forward_of_class, given_forward
from .code import codes_of
from .outside import HOLDER, call_outside
from .patches import BY_NAME, OVERRIDE, keys_of_patch, may_hold_state

PATCHES = ("patches", "patches_replace")
# Written by the host's samplers and models for patches to read; see research of ComfyUI 0.30 (samplers.py, ldm/*/model.py).
BOOKKEEPING = frozenset(
    {
        "wrappers", "callbacks", "sample_sigmas", "sigmas", "cond_or_uncond", "uuids", "prefetch_dynamic_vbars",
        "block", "block_index", "block_type", "total_blocks", "transformer_index", "grid_sizes", "img_slice",
        "activations_shape", "original_shape", "reference_image_num_tokens", "multigpu_thread_device", "easycache",
    }
)  # fmt: skip
# What a block may have got another value of.
_NOT_WRITTEN = BOOKKEEPING.union(PATCHES, {OVERRIDE, HOLDER})
# Say where a block stands.
POSITION = frozenset({"block", "block_index", "block_type", "transformer_index"})
# The UNets' attention: it loops over the options, and uses POSITION only to look up replacements in `patches_replace`.
UNET_ATTENTION = "comfy.ldm.modules.attention"
# Patches that models call outside their blocks (ldm/*/model.py, openaimodel.py).
AROUND_BLOCKS = frozenset(
    {
        "input_block_patch", "input_block_patch_after_skip", "middle_block_after_patch", "output_block_patch", "emb_patch",
        "forward_timestep_embed_patch", "double_block", "single_block", "post_input", "noise_refiner",
    }
)  # fmt: skip
# The host, and libraries that it calls with tensors alone: no code of theirs reads options but by a literal key.
_HOST = {"comfy", "comfy_extras", "comfy_kitchen", "torch", "torchvision", "einops", "sageattention", "flash_attn"}
_NO_PACKS = _HOST.union(sys.stdlib_module_names)


def keys_read(block: nn.Module) -> frozenset[str]:
    """The bookkeeping keys that the code of `block` may depend on.

    Code of the host depends on the keys that it names: in the methods of the block's class and of the classes below it, and in
    the functions that these name. BOOKKEEPING if code of another pack may get the options.
    """
    for module in block.modules():
        replaced = given_forward(module) if module is not block else None
        for forward in (forward_of_class(type(module)), replaced):
            if forward is not None and not isinstance(forward, types.FunctionType | types.MethodType):
                return BOOKKEEPING  # a callable of another kind, which may read anything
    codes = {code: module.get("__name__", "") for code, module in codes_of(block, block.modules()).items()}
    beside_layers = codes_of(block, (module for module in block.modules() if module is block or not _is_layer(module)))
    if any(_is_foreign(origin) and _may_read_options(code, code in beside_layers) for code, origin in codes.items()):
        return BOOKKEEPING
    return frozenset(
        key for code, origin in codes.items() for key in _keys_in_code(code) if origin != UNET_ATTENTION or key not in POSITION
    )


def strings_in(block: nn.Module) -> frozenset[str]:
    """All string literals in the code that `keys_read` looks at."""
    return frozenset(c for code in codes_of(block, block.modules()) for c in code.co_consts if isinstance(c, str))


def _is_layer(module: nn.Module) -> bool:
    """Whether `module` is of a class of PyTorch's that is called with tensors alone, or of one derived from that."""
    origins = [base.__module__ for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules.")]
    return not {"torch.nn.modules.module", "torch.nn.modules.container"}.issuperset(origins)


def _is_foreign(origin: str) -> bool:
    return origin.partition(".")[0] not in _NO_PACKS


def _may_read_options(code: types.CodeType, in_rest: bool) -> bool:
    """Whether code uses a variable, key or attribute under the options' names.

    Args:
        in_rest: the options may also be in its `*args` or `**kwargs`: what uses these counts.
    """
    names = set(BY_NAME)
    if in_rest and code.co_name != "__init__":
        rest = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        named = code.co_argcount + code.co_kwonlyargcount
        names.update(code.co_varnames[named : named + rest])
    used = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return any(not names.isdisjoint(values) for values in used)


def _keys_in_code(code: types.CodeType) -> set[str]:
    named = BOOKKEEPING.intersection(c for c in code.co_consts if isinstance(c, str))
    if not named:
        return set()
    instructions = list(dis.get_instructions(code))
    return {
        this.argval
        for this, following in zip(instructions, [*instructions[1:], None], strict=True)
        if this.argval.__class__ is str
        and this.argval in named
        # `options[key] = value` writes the key; it does not depend on it.
        and not (following is not None and following.opname == "STORE_SUBSCR")
        and "CONST" in this.opname
    }


class OptionsFilter:
    """Remove from `transformer_options` what a block class and the patches in it do not read.

    `is_whole`: code of another pack may read the options, so that the block gets the host's own dict.

    Args:
        may_break: whether graphs may be broken to call patches outside of them.
    """

    def __init__(self, block: nn.Module, may_break: bool = True):
        read = keys_read(block)
        self.is_whole = read == BOOKKEEPING
        self.dropped = BOOKKEEPING - read
        self.around = AROUND_BLOCKS - strings_in(block)
        self.may_break = may_break and not self.is_whole

    def __call__(self, options: dict, outside: Container[tuple[str, ...]] = ()) -> tuple[dict, tuple[str, ...]]:
        """The dict to hand to the block, and the names of the patches that run inside it.

        If code of another pack, or of a patch, cannot be analysed, the host's dict is returned unfiltered.

        Args:
            outside: combinations of patches of which those that may are called outside of the graphs.
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
        names = tuple(dict.fromkeys(f"{name} {_name_of(patch)}" for name, patch in inside))
        if self.is_whole:
            return options, names
        read: set[str] = set()
        moved = []
        for name, patch in inside:
            keys = keys_of_patch(name, patch)
            is_alone = self.may_break and name not in patches
            if is_alone and (names in outside or (keys is None and may_hold_state(patch))):
                moved.append(patch)
            elif keys is None or keys.intersection(PATCHES):
                return options, names
            else:
                read |= keys
        dropped = self.dropped - read
        # Present and empty is one state, absent another, and guards see the order: settle on one.
        settled: dict = {"patches": patches, "patches_replace": replacements}
        kept = settled | {k: v for k, v in options.items() if k not in dropped and k not in PATCHES}
        if replacements:
            _add_position(kept, options, dropped)
        if moved:
            call_outside(moved, kept, options)
        return kept, names

    def moves(self, options: dict, names: tuple[str, ...]) -> bool:
        """Whether some patch of `options`, whose patches have these names, can be called outside of the graphs."""
        return HOLDER in self(options, {names})[0]

    @staticmethod
    def write_back(original: dict, filtered: Mapping) -> None:
        """Copy what the block wrote for later blocks to the host's dict."""
        for key, value in filtered.items():
            if key not in _NOT_WRITTEN and original.get(key, original) is not value:
                original[key] = value


def _replacements_for(options: Mapping) -> dict[str, dict]:
    """The replacements inside the block that `options` places, by kind; those of other blocks are not looked up by it."""
    here = _place(options)
    replacements = {}
    for name, entries in (options.get("patches_replace") or {}).items():
        if name == "dit":  # wraps the block from outside (ldm/*/model.py) and never reaches into it
            continue
        if here is not None and name in ("attn1", "attn2"):
            entries = {k: v for k, v in entries.items() if not _is_place(k) or tuple(k[:2]) == here}
        if entries:
            replacements[name] = entries
    return replacements


def _add_position(kept: dict, options: Mapping, dropped: frozenset[str]) -> None:
    """Keep in the options what the block looks up its replacements by.

    Where nothing but that lookup depends on the block's place, all blocks get the same place, and share a graph.
    """
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
