"""Keep compiled code by model: shared by all clones and nodes, kept across executions, freed with the model."""

import enum
import functools
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn

from ..blocks.convolutions import kind_of
from ..blocks.state import BlockState, is_made_anew, sharing_classes
from ..cache.structure import structure_of
from ..errors import TorchCompileKitError
from ..failures.describe import Failure, in_one_line, never_swallowed
from ..log import logger
from ..ownership import forward_inside
from ..per_model import PerModel
from ..settings import CompileSettings
from ..transformer_options.filter import OptionsFilter
from .compiled_code import BlockCode, free_unused
from .eager import CALL_SECONDS, RUN_SECONDS, Eager, Taken
from .group import BlockGroup


class WaitsFor(enum.Enum):
    """What must happen before a model is compiled."""

    PAYBACK = enum.auto()  # more runs of the model
    IMPORT = enum.auto()  # the import of the compiler


class ModelCode:
    """The compiled groups of one diffusion model, per settings.

    Attributes:
        ran_apart: (settings, whether the batch was one) for which a warmup has run prompt and negative one by one.
        eager: reason -> blocks that run eager, counted by class, where that is decided for a whole call of the model.
        taken: blocks that ran another node's forward in the last call.
        parts: compiled parts of blocks that are not compiled whole, counted by class.
        uncalled: blocks, counted by class, if no call has run any: the model calls other methods of blocks. None: no call yet.
        not_looked_at: class -> the error that was raised when a module of the class was inspected.
        runs: how many sampling runs have begun.
        traced: for how many seconds blocks were traced in this run; `lowered`: for how many of them graphs were lowered.
        put_off: in how many calls of the model blocks ran uncompiled because tracing had taken too long.
        lacking: in how many calls blocks ran uncompiled because a trace would not have paid yet.
        mixed: in how many calls some blocks ran compiled and others did not, though they may be compiled.
        waits_for: why the last call could compile nothing.
        replays_operators: the CUDA graph of the current call holds uncompiled operators: the call's size is not compiled yet.
        title: the model's name for the user; empty: nobody has given one.
        eager_calls: how many calls ran blocks uncompiled that may be compiled.
        bound: the blocks that run compiled in the current call.
        packings: code that unpacks weights of the model's layers, shared by all models with weights packed the same way.
    """

    def __init__(self) -> None:
        self.title = ""
        self._groups: dict[tuple, BlockGroup] = {}
        self.ran_apart: set[tuple] = set()
        self.eager: defaultdict[Eager, Counter[str]] = defaultdict(Counter)
        self.taken: list[Taken] = []
        self.parts: Counter[str] = Counter()
        self.uncalled: Counter[str] | None = None
        self.not_looked_at: dict[str, str] = {}
        self.eager_calls = 0
        self.bound: list[nn.Module] = []
        self.packings: frozenset[BlockCode] = frozenset()
        self.runs = 0
        self.traced = self.lowered = 0.0
        self.put_off = self.lacking = self.mixed = 0
        self.waits_for: WaitsFor | None = None
        self.replays_operators = False
        self._new_groups: Counter[tuple] = Counter()
        self._over_limit: list[tuple[BlockState, tuple]] = []
        self._generation = 0, False
        self._said_taken: set[Taken] = set()
        self._classes: weakref.WeakValueDictionary[Hashable, type] = weakref.WeakValueDictionary()
        self._of_block: weakref.WeakKeyDictionary[nn.Module, BlockState] = weakref.WeakKeyDictionary()
        self._filters: defaultdict[tuple, list[OptionsFilter]] = defaultdict(list)

    @property
    def groups(self) -> dict[tuple, BlockGroup]:
        """All groups; the last part of a key is `settings_key()`."""
        return dict(self._groups)  # a copy: the sampler's thread adds groups while the page asks

    def look(self, module: nn.Module, look: Callable[[], Any], otherwise: Any) -> Any:
        """The result of `look`, which inspects `module`; if `look` raises, `otherwise`, with which less is compiled."""
        try:
            return look()
        except TorchCompileKitError:
            raise
        except Exception as error:
            if never_swallowed(error):
                raise
            name = type(module).__name__
            if name not in self.not_looked_at:
                self.not_looked_at[name] = in_one_line(error)
                logger.warning("%s", self._not_looked_at_in_words(name), exc_info=True)
            return otherwise

    def group_of(self, block: nn.Module, settings: CompileSettings) -> tuple[BlockGroup | None, BlockState | None]:
        """The group that runs `block`, or None, and the state of the block; asked before each call of the block."""
        return self.look(block, functools.partial(self._group_of, block, settings), (None, None))

    def _group_of(self, block: nn.Module, settings: CompileSettings) -> tuple[BlockGroup | None, BlockState]:
        settings_key = settings.settings_key()
        state = self._of_block.get(block)
        if state is None or not state.holds(block):
            state = self._of_block[block] = BlockState(block, self._classes)
        if state.options is None or not state.options.is_current():
            state.options = self._filter_for(block, state)
        if settings_key not in state.groups:
            with sharing_classes(state.shared):
                state.groups[settings_key] = self._find_group(block, state, settings)
        return state.groups[settings_key], state

    def _filter_for(self, block: nn.Module, state: BlockState) -> OptionsFilter:
        """The filter of a block, shared by blocks with the same code: reading code takes longer than looking at the block."""
        known = self._filters[state.methods, state.forwards, state.callables]
        for current in filter(OptionsFilter.is_current, known):
            return current
        known[MOST_FILTERS:] = []
        known.insert(0, OptionsFilter(block))
        return known[0]

    def state_of(self, block: nn.Module) -> BlockState | None:
        return self._of_block.get(block)

    def called(self, blocks: Counter[str], ran: bool) -> None:
        """Called after each call of the model with the blocks that were bound, by class; `ran`: some were called."""
        if ran:
            self.uncalled = Counter()
        elif self.uncalled is None and blocks:
            self.uncalled = blocks
            logger.warning("%s", _UNCALLED.format(_counted(blocks)))

    def note_taken(self, blocks: Iterable[tuple[str, str]]) -> None:
        """Called before each call of the model with the blocks that run another node's forward: (class, the forward's name)."""
        self.taken = [Taken(*block, number) for block, number in Counter(blocks).items()]
        for taken in self.taken:
            if taken not in self._said_taken:
                self._said_taken.add(taken)
                logger.warning("%s", taken.message())

    def eager_in_words(self) -> list[str]:
        """Which blocks run eager, and why, except for failures of groups."""
        convolutions, small = self.eager[Eager.CONVOLUTIONS], self.eager[Eager.SMALL]
        lines = []
        if convolutions:
            why = "as they take most of the compile time"
            lines.append(f"Blocks of convolutions ({_counted(convolutions)}) stay uncompiled, {why}.")
            if small:
                lines.append(f"So do blocks at which compiling would save little ({_counted(small)}).")
        lines += map(self._not_looked_at_in_words, self.not_looked_at)
        if self.put_off:
            lines.append(_PUT_OFF.format(self.put_off, CALL_SECONDS, RUN_SECONDS))
        if self.lacking:
            lines.append(_LACKING.format(self.lacking))
        if self.uncalled:
            lines.append(_UNCALLED.format(_counted(self.uncalled)))
        lines += self.inline_in_words()
        caching = dict.fromkeys(group.class_name for group in list(self._groups.values()) if Eager.FILLS_CACHE in group.eager)
        lines += [f"{name}: {_FILLS_CACHE}" for name in caching]
        return lines + [failure.message() for failure in self.failures]

    def inline_in_words(self) -> list[str]:
        return [code.inline_in_words() for code in self._codes() if code.why_inline is not None]

    def _not_looked_at_in_words(self, name: str) -> str:
        return f"{name} runs uncompiled: this pack could not look at it ({self.not_looked_at[name]})."

    def groups_of(self, settings: CompileSettings) -> list[BlockGroup]:
        key = settings.settings_key()
        return [group for (*_, of_settings), group in self.groups.items() if of_settings == key]

    @property
    def is_being_compiled(self) -> bool:
        return any(code.is_being_lowered for code in self._codes())

    @property
    def failures(self) -> list[Failure | Taken]:
        """Why blocks, or code that unpacks weights, run eager, except for failures of groups."""
        return [*self.taken, *(code.failure for code in self.packings if code.failure is not None)]

    def _codes(self) -> list[BlockCode]:
        return [*(group.code for group in self.groups.values()), *self.packings]

    def generation(self, kernels_ready: bool) -> tuple[int, bool]:
        """How often code was made, and whether kernels were ready, when the queue last had no job of the model."""
        if not self.is_being_compiled:
            self._generation = self.compiles, kernels_ready
        return self._generation

    @property
    def compiles(self) -> int:
        """How often code was made."""
        return sum(code.compiles for code in self._codes())

    def new_run(self) -> None:
        self.runs += 1
        self.traced = self.lowered = 0.0
        # Blocks that used up MOST_NEW groups in the last run may have one new group in this run.
        self._new_groups = Counter({kind: MOST_NEW - 1 for kind, count in self._new_groups.items() if count >= MOST_NEW})
        for state, key in self._over_limit:
            state.groups.clear()
            self._groups.pop(key, None)
        self._over_limit.clear()
        self._filters.clear()
        free_unused()
        for group in self._groups.values():
            group.new_run()
        for code in self.packings:
            code.reset_failure()

    def _find_group(self, block: nn.Module, state: BlockState, settings: CompileSettings) -> BlockGroup | None:
        forward = forward_inside(type(block))
        if not isinstance(forward, types.FunctionType):
            return None
        structure = structure_of(block)
        key = (structure, state.methods, state.forwards, state.hooked, settings.settings_key())
        group = self._groups.get(key)
        # The forward of a class that is made for each model may name its class (`super()`).
        other = _groups.get(key) if not is_made_anew(type(block)) else None
        if group is None and other is not None and other.code.failure is None and not other.code.limit_reached:
            group = other  # of another model, which may be gone
        if group is None:
            name = type(block).__name__
            group = BlockGroup(name, forward, settings)
            kind = name, structure, settings.settings_key()
            if state.hooked:  # PyTorch sets no guards on hooks: compiled code would keep calling them, or never call them
                reason = f"it has a forward hook on {', '.join(state.hooked)}."
                group.code.failures[()] = Failure(group.class_name, reason, "Remove the hook.")
            elif self._new_groups[kind] >= MOST_NEW:
                return self._given_up(group, state, kind)
            self._new_groups[kind] += not state.hooked
            _groups[key] = group
            for other in self.bound:  # a trace must know in which numbers blocks differ
                if kind_of(other) == kind_of(block):
                    group.record_varying_ints(other)
        group.record_varying_ints(block)
        self._groups[key] = group
        self._forget_like(key)
        _recent.pop(key, None)
        _recent[key] = group  # newest last
        for oldest in list(_recent)[:-MOST_RECENT]:
            _recent.pop(oldest, None)  # another GPU's thread may have
        return group

    def _given_up(self, group: BlockGroup, state: BlockState, kind: tuple) -> BlockGroup:
        """A group that runs the block uncompiled for the rest of the run; the report has the last group of its kind."""
        name, structure, settings_key = kind
        key = (structure, name, settings_key)
        reason = f"its code, or that of its layers, was replaced more than {MOST_NEW} times in one run."
        failure = Failure(name, reason, "A node does so in each step; runs without that node stay compiled.")
        if self._groups.pop(key, None) is None:
            logger.warning("%s", failure.message())
        group.code.failures[()], self._groups[key] = failure, group
        self._over_limit.append((state, key))
        return group

    def _forget_like(self, key: tuple) -> None:
        """Forget the oldest groups that differ from the newest only in methods: some nodes replace methods in each run."""
        structure, *_, settings_key = key
        name = self._groups[key].class_name
        like = [
            old for old, group in self._groups.items() if (group.class_name, old[0], old[-1]) == (name, structure, settings_key)
        ]
        if len(like) > MOST_LIKE:
            used = {id(group) for state in self._of_block.values() for group in state.groups.values()}
            for old in like[:-MOST_LIKE]:
                if id(self._groups[old]) not in used:
                    del self._groups[old]


# How many groups are kept that differ by replaced methods alone: a workflow's branches switch between a few.
MOST_LIKE = 8
# How many filters are kept for blocks of the same code: a wrapper may exchange functions for the length of each call.
MOST_FILTERS = 3
# The most groups that one run makes for blocks of one class and structure: less than MOST_LIKE, so that the usual ones stay.
MOST_NEW = 6

_UNCALLED = "The model does not call its blocks ({}) as modules but by other methods: they run uncompiled."
_PUT_OFF = (
    "Tracing blocks took too long in {} calls of the model (it stops after {:.0f} s in one, and {:.0f} s in a run): what was "
    "left ran uncompiled in them, and is compiled in later ones. If that goes on, a node brings new code in each step."
)
_LACKING = (
    "In {} calls of the model blocks ran uncompiled that had no code for the batch or patch: to make it would have taken "
    "longer than it saves. It is made when more of such calls have come, or now: by the button on the Torch Compile node, by "
    "Torch Compile Warmup, or with compile_when set to `before first image`."
)
_FILLS_CACHE = "calls that fill a cache run uncompiled, as each block would need code of its own; the others are compiled."


def _counted(classes: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in classes.items())


# Two models of one architecture (Wan's high and low noise halves) share code, which holds no weight.
_groups: weakref.WeakValueDictionary[tuple, BlockGroup] = weakref.WeakValueDictionary()
# Groups are kept beyond their model: ComfyUI frees models after each prompt under --cache-none and when RAM is short.
_recent: dict[tuple, BlockGroup] = {}
MOST_RECENT = 24
# The compiled code that belongs to a model (the module whose blocks are compiled).
code_of = PerModel(lambda _model: ModelCode())


live_models = code_of.items
