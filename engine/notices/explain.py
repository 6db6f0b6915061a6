"""The sentence for each cause of a compilation, with its cure."""

from __future__ import annotations

from .call_info import CallInfo


def cause(before: CallInfo, now: CallInfo, dynamic: str, warmed: bool, guard: str) -> str:
    """Why a run had to compile, and what would have avoided it.

    Args:
        before: what had been compiled and is nearest to `now`.
        dynamic: the input of Torch Compile Model.
        warmed: whether there is a warmup node to speak of.
        guard: PyTorch's own words; told only where nothing else is known.
    """
    found = next((found for find in _FINDERS if (found := find(before, now, dynamic)) is not None), None)
    if found is None:
        details = f" Details: {guard}" if guard else ""
        return f"something changed that the compiled code depends on, other than size, prompt and patches.{details}"
    what, cure, elsewhere = found
    if warmed:
        return f"{what}. {cure}."
    beforehand = "Torch Compile Warmup behind Torch Compile Model compiles beforehand"
    return f"{what}. {beforehand}{'; or ' + elsewhere if elsewhere else ''}."


# Each gives what changed, the cure where a warmup ran, and a cure that needs no warmup, if there is one.
Found = tuple[str, str, str]


def _layers(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.layers == now.layers:
        return None
    new = [name for name in now.layers if name not in before.layers]
    what = f"layers of the model were exchanged ({', '.join(new)})" if new else "exchanged layers of the model were put back"
    return f"{what}, as a LoRA in bypass mode does", "Put Torch Compile Warmup behind the node that does it", ""


def _patches(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.patches == now.patches:
        return None
    new = [p for p in now.patches if p not in before.patches]
    what = f"the patches of the model changed ({', '.join(new) or 'one was removed'})"
    return what, "Put Torch Compile Warmup behind the node that patches", ""


def _size(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    changes = [
        f"{name} changed from {getattr(before, name)} to {getattr(now, name)}"
        for name in ("width", "height", "length")
        if getattr(before, name) != getattr(now, name)
    ]
    if not changes:
        return None
    elsewhere = "" if dynamic == "true" else "set dynamic to true"
    return ", ".join(changes), f"Add {now.size()} to extra_sizes{_or(elsewhere)}", elsewhere


def _batch(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    if before.batch == now.batch:
        return None
    elsewhere = "set dynamic to true" if dynamic == "false" and min(before.batch, now.batch) > 1 else ""
    what = f"the batch changed from {before.batch} to {now.batch}"
    return what, f"Add {now.size() if now.batch > 1 else now.size() + ' batch 1'} to extra_sizes{_or(elsewhere)}", elsewhere


def _together(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.prompts_per_call == now.prompts_per_call:
        return None
    if now.prompts_per_call > before.prompts_per_call:
        what = f"{now.prompts_per_call} prompts ran in one batch, not {before.prompts_per_call} (cfg above 1 adds the negative)"
    else:
        what = f"{now.prompts_per_call} of {before.prompts_per_call} prompts ran in a batch (cfg is 1, or memory is short)"
    return what, "Give the warmup the sampler's cfg and prompts", ""


def _prompt(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    if before.tokens == now.tokens:
        return None
    what = f"the prompt's length changed from {before.tokens} to {now.tokens} tokens"
    if dynamic == "false":
        return what, "Set dynamic to auto, or connect a prompt of that length to the warmup", "set dynamic to auto"
    return what, "Connect a prompt of that length to the warmup", ""


def _controlnet(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.controlnet == now.controlnet:
        return None
    what = f"a ControlNet was {'added' if now.controlnet else 'removed'}"
    return what, "Connect the conditioning that the sampler gets, behind the ControlNet's node, to the warmup", ""


def _inputs(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    old, new = dict(before.inputs), dict(now.inputs)
    changes = [f"{name} was added" for name in new if name not in old] + [
        f"{name} was removed" for name in old if name not in new
    ]
    changes += [f"{name} changed its size" for name in new if name in old and new[name] != old[name]]
    if not changes:
        return None
    what = f"the conditioning changed: {', '.join(changes)}"
    elsewhere = "set dynamic to auto" if dynamic == "false" else ""
    return what, f"Connect the conditioning that the sampler gets to the warmup{_or(elsewhere)}", elsewhere


def _or(cure: str) -> str:
    return f", or {cure}" if cure else ""


_FINDERS = (_layers, _patches, _size, _batch, _together, _prompt, _controlnet, _inputs)
