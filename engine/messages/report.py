"""Report what was compiled, what it cost and what stayed eager, in words and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ..blocks.discovery import BlockPlan
from ..compile.binding import plan_for
from ..compile.eager import Taken
from ..compile.group import BlockGroup
from ..compile.registry import code_of, live_models
from ..compile.session import CompileStats
from ..per_model import PerModel
from ..settings import CompileSettings
from .recompile_log import watch_of
from .words import counted, say

RULE = "-" * 24  # js/node_report.js folds what is below
SIZES_NAMED = 4


def groups_for(model: nn.Module, settings: CompileSettings) -> list[BlockGroup]:
    key = settings.settings_key()
    return [group for k, group in code_of(model).groups.items() if k[-1] == key]


def stats_for(model: nn.Module, settings: CompileSettings) -> CompileStats:
    return sum((group.stats for group in groups_for(model, settings)), CompileStats())


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
        lines += [*self.notes, *self._problem_lines()]
        return "\n".join(lines)

    def _outcome(self) -> str:
        sizes = [size.label.partition(" (")[0].removesuffix(" batch 1") for size in self.sizes]
        named = ", ".join(sizes[:SIZES_NAMED])
        if len(sizes) > SIZES_NAMED:
            named = say("more", named, len(sizes) - SIZES_NAMED)
        graphs, from_disk = (sum(getattr(size.added, name) for size in self.sizes) for name in ("graphs", "from_disk"))
        seconds = sum(size.added.seconds for size in self.sizes)
        if self._compiles_nothing():
            return say("nothingCompiled", named)
        if not graphs:
            done = say("nothingToDo")
        elif from_disk >= graphs:
            done = say("readFromDisk", f"{seconds:.0f}")
        else:
            taken = f"{seconds:.0f}"
            done = say("compiledInSome", taken, from_disk, graphs) if from_disk else say("compiledIn", taken)
        return say("readyFor", named, done)

    def _compiles_nothing(self) -> bool:
        if self.taken and sum(taken.blocks for taken in self.taken) >= len(self.plan.blocks):
            return True
        return bool(self.groups) and all(group.failure for group in self.groups)

    def _to_do(self) -> list[str]:
        lines = [say("inEnglish", group.failure.message()) for group in self.groups if group.failure]
        lines += [say("limitReached", group.class_name) for group in self.groups if group.limit_reached]
        return list(dict.fromkeys([*given_in_words(self.taken), *lines]))

    def _block_lines(self) -> list[str]:
        plan = self.plan
        share = f"{plan.covered_share:.0%} of the weights"
        if plan.whole_model:
            return [f"No repeated blocks found: the whole model is compiled as one region ({share})."]
        lines = [f"{len(plan.blocks)} blocks, {share}; the rest of the model stays uncompiled."]
        graphs = _graphs_by_class(self.groups)
        for where, counts in (("", Counter(b.class_name for b in plan.blocks)), ("inside these, ", self.parts)):
            for name, count in counts.items():
                lines.append(f"  {where}{name}: {counted(count, 'block')}, {counted(graphs[name], 'graph')}")
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

    def _problem_lines(self) -> list[str]:
        total = sum((group.stats for group in self.groups), CompileStats())
        lines = [f"Graph breaks: {total.graph_breaks}"] if total.graph_breaks else []
        reasons = [(str(reason).strip().partition("\n")[0], count) for reason, count in total.breaks.items()]
        lines += [f"  {count} x {reason}" for reason, count in reasons]
        return lines


def given_in_words(taken: Sequence[Taken]) -> list[str]:
    """A sentence about the blocks that run another node's forward, if there are any."""
    forwards = dict.fromkeys(t.forward for t in taken)
    return [say("limitGiven", sum(t.blocks for t in taken), ", ".join(forwards))] if taken else []


def sizes_of(model: nn.Module) -> list[str]:
    """Labels (`1024x1024`) of what a model has been compiled for or has run compiled at."""
    sizes = [info.size() for calls in list(watch_of(model).compiled_for.values()) for info in calls]
    return list(dict.fromkeys([*sizes, *list(watch_of(model).sizes.values())]))


def report_json() -> dict:
    return {"models": [_model_json(model, list(code.groups.values())) for model, code in live_models()]}


# What limited the model in its last benchmark (host/nodes/limits.py), a line each.
limits_of: PerModel[list[str]] = PerModel(lambda _model: [])


def _model_json(model: nn.Module, groups: list[BlockGroup]) -> dict:
    total = sum((group.stats for group in groups), CompileStats())
    blocks = plan_for(model).blocks
    graphs = _graphs_by_class(groups)
    gained = watch_of(model).gained
    failures = [*(group.failure for group in groups if group.failure), *code_of(model).failures]
    return {
        "name": code_of(model).title or type(model).__name__,
        "being_compiled": list(dict.fromkeys(group.class_name for group in groups if group.is_being_compiled)),
        "is_only_read": all(group.code.is_only_read for group in groups if group.is_being_compiled),
        "sizes": sizes_of(model),
        "runs": code_of(model).runs,
        "seconds_gained": None if gained is None else round(gained, 3),
        "limits": limits_of(model),
        "blocks": len(blocks),
        "blocks_not_called": dict(code_of(model).uncalled or {}),
        "groups": len(groups),
        "graphs": total.graphs,
        "graphs_from_disk": total.from_disk,
        "compiled_outside_warmup": watch_of(model).notices,
        "graph_breaks": total.graph_breaks,
        "compile_seconds": round(total.seconds, 3),
        "recompiles": [{"block": r.block, "guard": r.guard} for r in total.recompiles],
        "failures": [{"block": failure.block, "message": failure.message()} for failure in failures],
        "classes": [
            {"class": name, "blocks": count, "graphs": graphs[name]}
            for name, count in [*Counter(b.class_name for b in blocks).items(), *code_of(model).parts.items()]
        ],
    }


def _graphs_by_class(groups: list[BlockGroup]) -> Counter[str]:
    return sum((Counter({group.class_name: group.stats.graphs}) for group in groups), Counter())
