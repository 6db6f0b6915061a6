"""Tell users why a call of a model had to compile while sampling, and what would have avoided it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

from torch import nn

from ..compile.session import CompileStats
from ..log import logger
from ..per_model import PerModel
from ..settings import CompileSettings
from .words import say

NOTICES_KEPT = 20


@dataclass(frozen=True)
class CallInfo:
    """Properties in which calls of a model differ, in the user's units."""

    width: int = 0  # pixels; 0 where the model has none
    height: int = 0
    length: int = 1  # frames
    batch: int = 1
    prompts_per_call: int = 1  # cfg above 1 runs the negative prompt in one batch with the positive
    tokens: int = 0  # length of the prompt
    controlnet: bool = False
    inputs: tuple[tuple[str, tuple], ...] = ()  # other tensors of the conditioning: names, shapes without the batch
    patches: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # names of functions that run in place of layers

    def size(self) -> str:
        """The size as a line of extra_sizes; `latent_image` for sound, which has no such line."""
        frames = f"x{self.length}" if self.length > 1 else ""
        size = f"{self.width}x{self.height}{frames}" if self.width else "latent_image"
        return f"{size} batch {self.batch}" if self.batch > 1 else size


@dataclass
class Watch:
    """For one model: the calls that compiled, in a warmup and outside, and what the page and reports say of other calls."""

    compiled_for: dict[tuple, list[CallInfo]] = field(default_factory=dict)  # by `CompileSettings.settings_key`
    warmed: set[tuple] = field(default_factory=set)  # the settings under which a warmup has run
    # The last calls that compiled outside of a warmup, each with its sentence; a warmup of the same call removes it.
    outside_warmup: list[tuple[CallInfo, str]] = field(default_factory=list)
    sizes: dict[Hashable, str] = field(default_factory=dict)  # labels of compiled calls, by the shape of their input
    limits: Sequence[str] = ()  # what limited the model in its last benchmark (host/nodes/limits.py), a line each
    left: list | None = None  # why the model is not compiled (host/model/wrapper.py), see `words.told`
    foreign: str | None = None  # the pack whose code keeps CUDA graphs off (host/graphs/replay.py)
    # Returns in about how many sampling runs compiling begins, and the name by which the page can start compiling now
    # (host/model/payback.py); None: compiling is not put off.
    put_off: Callable[[], tuple[int, str] | None] = lambda: None
    # The same for code that the last call of a compiled model lacked.
    lacks: Callable[[], tuple[int, str] | None] = lambda: None
    # Why the last call ran uncompiled though there is code for it (host/model/comparison.py), see `words.told`.
    left_slower: list | None = None
    saved: float | None = None  # share of a step's time; None: too few steps have run to compare
    gained: float | None = None  # seconds in all; None: too few uncompiled steps have run to compare with
    _stats: dict[tuple, CompileStats] = field(default_factory=dict)

    def added(self, settings: tuple, now: CompileStats) -> CompileStats:
        """What has been compiled under these settings since the last call of this method."""
        before = self._stats.get(settings, CompileStats())
        self._stats[settings] = now
        return now - before

    def note_warming(self, info: CallInfo, settings: tuple) -> None:
        self.warmed.add(settings)
        self.outside_warmup = [(other, sentence) for other, sentence in self.outside_warmup if other != info]
        self._add(info, settings)

    def notice(self, info: CallInfo, added: CompileStats, settings: CompileSettings) -> tuple[str, str | None] | None:
        """Note a call outside of a warmup. If it compiled: a sentence why, and the size that the warmup lacks, if any."""
        key, size = settings.settings_key(), None
        calls = self.compiled_for.get(key)
        self._add(info, key)
        if not added.graphs:
            return None
        if calls:
            nearest = min(calls, key=lambda call: sum(a != b for a, b in zip(astuple(call), astuple(info), strict=True)))
            guard = added.recompiles[-1] if added.recompiles else ""
            why, size = cause(nearest, info, settings.dynamic, key in self.warmed, guard)
        else:
            why = say("firstRun") if len(self.compiled_for) == 1 else say("firstSettings")
            if not settings.waits:
                why = say("cure", why, say("addWarmup"))
        sentence = say("waited", f"{added.seconds:.1f}", why)
        self.outside_warmup = [*self.outside_warmup, (info, sentence)][-NOTICES_KEPT:]
        return sentence, size

    @property
    def notices(self) -> list[str]:
        return [sentence for _info, sentence in self.outside_warmup]

    def _add(self, info: CallInfo, settings: tuple) -> None:
        calls = self.compiled_for.get(settings, [])
        if info not in calls:
            self.compiled_for[settings] = [*calls, info]


_warmups = 0
# Called with the model's name, the sentence, the size that extra_sizes lacks, and the node that compiles (nodes/routes.py).
listeners: list[Callable[[str, str, str | None, str | None], None]] = []
watch_of = PerModel(lambda _model: Watch())


@contextmanager
def warming() -> Iterator[None]:
    """A context in which all calls that compile count as calls of a warmup.

    On all threads: MultiGPU CFG Split calls models on threads of its own (comfy/multigpu.py), and the host runs one prompt at
    a time.
    """
    global _warmups
    _warmups += 1
    try:
        yield
    finally:
        _warmups -= 1


def is_warming() -> bool:
    return _warmups > 0


def report_compilation(
    model: nn.Module, name: str, info: CallInfo, added: CompileStats, settings: CompileSettings, node: str | None = None
) -> None:
    """Note a call that compiled or is part of a warmup; tell the log and the page what a warmup would have avoided.

    Args:
        node: id of the node that compiles the model.
    """
    watch, key = watch_of(model), settings.settings_key()
    if is_warming():
        watch.note_warming(info, key)
    elif (notice := watch.notice(info, added, settings)) is not None:
        logger.warning("%s: %s", name, notice[0])
        if settings.waits and key not in watch.warmed:
            return  # the user's settings ask for this wait
        for listener in listeners:
            listener(name, *notice, node)


def cause(before: CallInfo, now: CallInfo, dynamic: str, warmed: bool, guard: str) -> tuple[str, str | None]:
    """The sentence about a call that had to compile, and the line that a warmup's extra_sizes lacks, if that is the cause.

    Args:
        before: the call nearest to `now` among those that had been compiled for.
        guard: the failed guard in PyTorch's words; told only if `before` equals `now`.
    """
    for what, cure, other_cure, size in _differences(before, now, dynamic):
        if warmed:
            return say("cure", what, cure), size
        cure = say("addWarmupOr", other_cure) if other_cure else say("addWarmup")
        return say("cure", what, cure), None
    return say("unknown") + (say("details", guard) if guard else ""), None


def _differences(before: CallInfo, now: CallInfo, dynamic: str) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield each difference, the likeliest cause first.

    A difference is what changed, the cure where a warmup ran, a cure without a warmup (empty: there is none), and a line for
    extra_sizes.
    """
    set_auto = say("setAuto") if dynamic == "false" else ""
    if before.layers != now.layers:
        added = ", ".join(name for name in now.layers if name not in before.layers)
        yield say("layersNew", added) if added else say("layersBack"), say("behindLayers"), "", None
    if before.patches != now.patches:
        added = ", ".join(name for name in now.patches if name not in before.patches)
        yield say("patches", added) if added else say("patchesFewer"), say("behindPatches"), "", None
    width, height = (say("width"), before.width, now.width), (say("height"), before.height, now.height)
    sides = (width, height, (say("length"), before.length, now.length))
    changes = [say("changed", name, old, new) for name, old, new in sides if old != new]
    if changes:
        set_true = "" if dynamic == "true" else say("setTrue")
        yield ", ".join(changes), _or(say("addSize", now.size()), set_true), set_true, now.size()
    if before.batch != now.batch:
        set_true = say("setTrue") if dynamic == "false" and min(before.batch, now.batch) > 1 else ""
        size = (now.size() if now.batch > 1 else f"{now.size()} batch 1") if now.width else None
        cure = say("addSize", size) if size else say("connectLatent")
        yield say("batch", before.batch, now.batch), _or(cure, set_true), set_true, size
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
