"""The sentence for each cause of a compilation, with its cure."""

from __future__ import annotations

from .call_info import CallInfo
from .words import say


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
        return say("unknown") + (say("details", guard) if guard else "")
    what, cure, elsewhere = found
    if not warmed:
        cure = say("beforehandOr", elsewhere) if elsewhere else say("beforehand")
    return say("cure", what, cure)


def missing_size(before: CallInfo, now: CallInfo) -> str | None:
    """What to add to extra_sizes, where size or batch is why a run had to compile; None: something else is."""
    found = next((find for find in _FINDERS if find(before, now, "auto") is not None), None)
    if found is _size:
        return now.size()
    return _with_batch(now) if found is _batch else None


# Each gives what changed, the cure where a warmup ran, and a cure that needs no warmup, if there is one.
Found = tuple[str, str, str]


def _layers(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.layers == now.layers:
        return None
    new = [name for name in now.layers if name not in before.layers]
    return say("layersNew", ", ".join(new)) if new else say("layersBack"), say("behindLayers"), ""


def _patches(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.patches == now.patches:
        return None
    new = [p for p in now.patches if p not in before.patches]
    return say("patches", ", ".join(new)) if new else say("patchesFewer"), say("behindPatches"), ""


def _size(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    changes = [
        say("changed", name, getattr(before, name), getattr(now, name))
        for name in ("width", "height", "length")
        if getattr(before, name) != getattr(now, name)
    ]
    if not changes:
        return None
    elsewhere = "" if dynamic == "true" else say("setTrue")
    return ", ".join(changes), _or(say("addSize", now.size()), elsewhere), elsewhere


def _batch(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    if before.batch == now.batch:
        return None
    elsewhere = say("setTrue") if dynamic == "false" and min(before.batch, now.batch) > 1 else ""
    return say("batch", before.batch, now.batch), _or(say("addSize", _with_batch(now)), elsewhere), elsewhere


def _with_batch(info: CallInfo) -> str:
    return info.size() if info.batch > 1 else f"{info.size()} batch 1"


def _together(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.prompts_per_call == now.prompts_per_call:
        return None
    if now.prompts_per_call > before.prompts_per_call:
        what = say("joined", now.prompts_per_call, before.prompts_per_call)
    else:
        what = say("apart", now.prompts_per_call, before.prompts_per_call)
    return what, say("giveCfg"), ""


def _prompt(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    if before.tokens == now.tokens:
        return None
    what = say("tokens", before.tokens, now.tokens)
    if dynamic == "false":
        return what, say("setAutoOrPrompt"), say("setAuto")
    return what, say("connectPrompt"), ""


def _controlnet(before: CallInfo, now: CallInfo, _dynamic: str) -> Found | None:
    if before.controlnet == now.controlnet:
        return None
    return say("controlnetAdded" if now.controlnet else "controlnetRemoved"), say("behindControlnet"), ""


def _inputs(before: CallInfo, now: CallInfo, dynamic: str) -> Found | None:
    old, new = dict(before.inputs), dict(now.inputs)
    changes = [say("wasAdded", name) for name in new if name not in old]
    changes += [say("wasRemoved", name) for name in old if name not in new]
    changes += [say("otherSize", name) for name in new if name in old and new[name] != old[name]]
    if not changes:
        return None
    elsewhere = say("setAuto") if dynamic == "false" else ""
    return say("conditioning", ", ".join(changes)), _or(say("connectConditioning"), elsewhere), elsewhere


def _or(cure: str, other: str) -> str:
    return say("or", cure, other) if other else cure


_FINDERS = (_layers, _patches, _size, _batch, _together, _prompt, _controlnet, _inputs)
