"""Report what was compiled, what it cost and what stayed eager, in words and as JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..blocks.discovery import BlockPlan
from ..compile.binding import plan_for
from ..compile.eager import Taken
from ..compile.group import BlockGroup
from ..compile.registry import code_of, live_models
from ..compile.session import CompileStats
from ..settings import CompileSettings
from .recompile_log import watch_of
from .words import counted, say

RULE = "-" * 24  # js/node_report.js folds what is below
SIZES_NAMED = 4


def total_of(groups: Iterable[BlockGroup]) -> CompileStats:
    return sum((group.stats for group in groups), CompileStats())


def stats_for(model: nn.Module, settings: CompileSettings) -> CompileStats:
    return total_of(code_of(model).groups_of(settings))


@dataclass
class WarmedSize:
    label: str  # 1024x1024 batch 1
    seconds: float
    added: CompileStats


@dataclass
class CompileReport:
    model_name: str
    settings: CompileSettings
    plan: BlockPlan
    groups: list[BlockGroup]
    sizes: list[WarmedSize] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)  # classes inside the blocks that are compiled in place of the blocks
    taken: Sequence[Taken] = ()

    def text(self) -> str:
        """What the user can run now and should do, and below a rule the details."""
        lines = [self._outcome(), *self._to_do(), RULE]
        lines += [f"{self.model_name}: {self.settings.describe()}", *self._block_lines(), *self._size_lines()]
        total = total_of(self.groups)
        lines += [*self.notes, *([f"Graph breaks: {total.graph_breaks}"] if total.graph_breaks else [])]
        lines += [f"  {count} x {str(reason).strip().partition(chr(10))[0]}" for reason, count in total.breaks.items()]
        return "\n".join(lines)

    def _outcome(self) -> str:
        sizes = [size.label.partition(" (")[0].removesuffix(" batch 1") for size in self.sizes]
        named = ", ".join(sizes[:SIZES_NAMED])
        if len(sizes) > SIZES_NAMED:
            named = say("more", named, len(sizes) - SIZES_NAMED)
        if self._compiles_nothing():
            return say("nothingCompiled", named)
        added = sum((size.added for size in self.sizes), CompileStats())
        seconds, done = f"{added.seconds:.0f}", say("nothingToDo")
        if added.from_disk >= added.graphs > 0:
            done = say("readFromDisk", seconds)
        elif added.graphs and added.from_disk:
            done = say("compiledInSome", seconds, added.from_disk, added.graphs)
        elif added.graphs:
            done = say("compiledIn", seconds)
        return say("readyFor", named, done)

    def _compiles_nothing(self) -> bool:
        if self.taken and sum(taken.blocks for taken in self.taken) >= len(self.plan.blocks):
            return True
        return bool(self.groups) and all(group.failure for group in self.groups)

    def _to_do(self) -> list[str]:
        lines = [say("inEnglish", group.failure.message()) for group in self.groups if group.failure]
        lines += [say("limitReached", group.class_name) for group in self.groups if group.code.limit_reached]
        return list(dict.fromkeys([*given_in_words(self.taken), *lines]))

    def _block_lines(self) -> list[str]:
        plan = self.plan
        share = f"{plan.covered_share:.0%} of the weights"
        if plan.whole_model:
            return [f"No repeated blocks found: the whole model is compiled as one region ({share})."]
        lines = [f"{len(plan.blocks)} blocks, {share}; the rest of the model stays uncompiled."]
        for name, count, graphs, is_part in _by_class(plan, self.parts, self.groups):
            where = "inside these, " if is_part else ""
            lines.append(f"  {where}{name}: {counted(count, 'block')}, {counted(graphs, 'graph')}")
        return lines

    def _size_lines(self) -> list[str]:
        lines = []
        for size in self.sizes:
            graphs = size.added.graphs
            warm = "nothing compiled" if self._compiles_nothing() else "already warm"
            compiled = f"{counted(graphs, 'graph')} compiled" if graphs else warm
            if size.added.from_disk:
                compiled += f" ({size.added.from_disk} read from the cache on disk)"
            lines.append(f"{size.label}: {size.seconds:.1f} s, {compiled}")
        return lines


def given_in_words(taken: Sequence[Taken]) -> list[str]:
    """A sentence about the blocks that run another node's forward, if there are any."""
    forwards = dict.fromkeys(t.forward for t in taken)
    return [say("limitGiven", sum(t.blocks for t in taken), ", ".join(forwards))] if taken else []


def sizes_of(model: nn.Module) -> list[str]:
    """Labels (`1024x1024`) of the sizes that a model was compiled for or has run compiled at."""
    watch = watch_of(model)
    sizes = [info.size() for calls in list(watch.compiled_for.values()) for info in calls]
    return list(dict.fromkeys([*sizes, *list(watch.sizes.values())]))


def report_json() -> dict:
    return {"models": [_model_json(model, list(code.groups.values())) for model, code in live_models()]}


def _model_json(model: nn.Module, groups: list[BlockGroup]) -> dict:
    total, code, watch = total_of(groups), code_of(model), watch_of(model)
    classes = _by_class(plan_for(model), code.parts, groups)
    failures = [*(group.failure for group in groups if group.failure), *code.failures]
    return {
        "name": code.title or type(model).__name__,
        "being_compiled": list(dict.fromkeys(group.class_name for group in groups if group.code.is_being_lowered)),
        "is_only_read": all(group.code.is_only_read for group in groups if group.code.is_being_lowered),
        "sizes": sizes_of(model),
        "runs": code.runs,
        "seconds_gained": None if watch.gained is None else round(watch.gained, 3),
        "limits": watch.limits,
        "blocks": sum(count for _, count, graphs, _ in classes if graphs),  # compiled
        "blocks_not_called": dict(code.uncalled or {}),
        "groups": len(groups),
        "graphs": total.graphs,
        "graphs_from_disk": total.from_disk,
        "compiled_outside_warmup": watch.notices,
        "graph_breaks": total.graph_breaks,
        "compile_seconds": round(total.seconds, 3),
        "compiled_in_call": code.inline_in_words(),
        "failures": [{"block": failure.block, "message": failure.message()} for failure in failures],
        "classes": [{"class": name, "blocks": count, "graphs": graphs} for name, count, graphs, _ in classes],
    }


def _by_class(plan: BlockPlan, parts: Counter[str], groups: Iterable[BlockGroup]) -> list[tuple[str, int, int, bool]]:
    """Classes of blocks, and of parts that are compiled in their place: name, how many, their graphs, whether it is a part."""
    graphs: Counter[str] = Counter()
    for group in groups:
        graphs[group.class_name] += group.stats.graphs
    blocks = Counter(block.class_name for block in plan.blocks)
    classes = [(counts is parts, item) for counts in (blocks, parts) for item in counts.items()]
    return [(name, count, graphs[name], is_part) for is_part, (name, count) in classes]
