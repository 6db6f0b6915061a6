"""Say why a run had to compile, and what would have avoided it."""

from __future__ import annotations

from collections.abc import Iterator

from .call_info import CallInfo
from .words import say


def cause(before: CallInfo, now: CallInfo, dynamic: str, warmed: bool, guard: str) -> tuple[str, str | None]:
    """The sentence about a call that had to compile, and the line that a warmup's extra_sizes lacks, if that is the cause.

    Args:
        before: the call nearest to `now` among those that had been compiled for.
        dynamic: the input of Torch Compile Model.
        warmed: whether there is a warmup node to speak of.
        guard: PyTorch's own words; told only where `before` equals `now`.
    """
    for what, cure, other_cure, size in _differences(before, now, dynamic):
        if warmed:
            return say("cure", what, cure), size
        cure = say("beforehandOr", other_cure) if other_cure else say("beforehand")
        return say("cure", what, cure), None
    return say("unknown") + (say("details", guard) if guard else ""), None


def _differences(before: CallInfo, now: CallInfo, dynamic: str) -> Iterator[tuple[str, str, str, str | None]]:
    """The fields that differ, the likeliest cause first.

    Yields:
        What changed, the cure where a warmup ran, a cure without a warmup (empty: there is none), and a line for extra_sizes.
    """
    set_auto = say("setAuto") if dynamic == "false" else ""
    if before.layers != now.layers:
        added = ", ".join(name for name in now.layers if name not in before.layers)
        yield say("layersNew", added) if added else say("layersBack"), say("behindLayers"), "", None
    if before.patches != now.patches:
        added = ", ".join(name for name in now.patches if name not in before.patches)
        yield say("patches", added) if added else say("patchesFewer"), say("behindPatches"), "", None
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in ("width", "height", "length")}
    changes = [say("changed", name, old, new) for name, (old, new) in pairs.items() if old != new]
    if changes:
        set_true = "" if dynamic == "true" else say("setTrue")
        yield ", ".join(changes), _or(say("addSize", now.size()), set_true), set_true, now.size()
    if before.batch != now.batch:
        set_true = say("setTrue") if dynamic == "false" and min(before.batch, now.batch) > 1 else ""
        size = now.size() if now.batch > 1 else f"{now.size()} batch 1"
        yield say("batch", before.batch, now.batch), _or(say("addSize", size), set_true), set_true, size
    old_prompts, prompts = before.prompts_per_call, now.prompts_per_call
    if old_prompts != prompts:
        yield say("joined" if prompts > old_prompts else "apart", prompts, old_prompts), say("giveCfg"), "", None
    if before.tokens != now.tokens:
        cure = say("setAutoOrPrompt" if set_auto else "connectPrompt")
        yield say("tokens", before.tokens, now.tokens), cure, set_auto, None
    if before.controlnet != now.controlnet:
        yield say("controlnetAdded" if now.controlnet else "controlnetRemoved"), say("behindControlnet"), "", None
    old_inputs, inputs = dict(before.inputs), dict(now.inputs)
    changes = [say("wasAdded", name) for name in inputs if name not in old_inputs]
    changes += [say("wasRemoved", name) for name in old_inputs if name not in inputs]
    changes += [say("otherSize", name) for name in inputs if name in old_inputs and inputs[name] != old_inputs[name]]
    if changes:
        yield say("conditioning", ", ".join(changes)), _or(say("connectConditioning"), set_auto), set_auto, None


def _or(cure: str, other: str) -> str:
    return say("or", cure, other) if other else cure
