"""Find the repeated blocks of a model by its structure, without knowing its class.

Blocks of one class share one graph. Blocks are members of a ModuleList or ModuleDict that repeat a class (the block lists of
every DiT) and, where a model has mixed lists instead (UNets, Stable Cascade), members of repeated classes in those lists that
hold no block list themselves. Of blocks inside blocks, only the outermost count.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import InvalidSetting
from ..ownership import forward_of_class, given_forward

# A ModuleList with less than this share of the model's parameters is not worth a graph of its own.
MINIMUM_SHARE = 0.002


@dataclass(frozen=True)
class Block:
    """A block by its dotted path, empty for the model itself; patches may replace the module."""

    path: str
    class_name: str
    parameters: int


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of one model, in the order of the module tree; the model itself if no class repeats."""

    blocks: tuple[Block, ...]
    total_parameters: int
    whole_model: bool = False

    @property
    def covered_share(self) -> float:
        """The share of the model's parameters that the blocks hold."""
        return sum(b.parameters for b in self.blocks) / max(1, self.total_parameters)

    def select(self, patterns: tuple[str, ...]) -> BlockPlan:
        """Keep the blocks whose path matches a pattern of fnmatch, or all; InvalidSetting if a pattern matches no block."""
        for pattern in patterns:
            if not any(fnmatchcase(b.path, pattern) for b in self.blocks):
                raise InvalidSetting("only_blocks", pattern, f"matches no block; this model has {self.summary()}.")
        return self.matching(patterns)

    def matching(self, patterns: tuple[str, ...]) -> BlockPlan:
        """As `select`, but a pattern may match no block: a patch may hide the pattern's blocks."""
        if not patterns:
            return self
        chosen = tuple(b for b in self.blocks if any(fnmatchcase(b.path, p) for p in patterns))
        return BlockPlan(chosen, self.total_parameters, self.whole_model)

    def summary(self) -> str:
        """For example `double_blocks.* (19 DoubleStreamBlock), single_blocks.* (38 SingleStreamBlock)`."""
        if self.whole_model:
            return f"the whole model ({self.blocks[0].class_name})"
        groups = Counter((_without_indices(b.path), b.class_name) for b in self.blocks)
        return ", ".join(f"{path} ({n} {name})" for (path, name), n in groups.items())


def _without_indices(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def find_blocks(model: nn.Module) -> BlockPlan:
    total = size_of(model)
    is_listed = _listed_blocks(model, MINIMUM_SHARE * total)
    repeated = _repeated_in_mixed_lists(model, _outermost(model, "", is_listed))
    blocks = [*_outermost(model, "", lambda m: is_listed(m) or id(m) in repeated)]
    if not blocks:
        return BlockPlan((Block("", type(model).__name__, total),), total, whole_model=True)
    return BlockPlan(tuple(Block(path, type(m).__name__, size_of(m)) for path, m in blocks), total)


def _listed_blocks(model: nn.Module, minimum: float) -> Callable[[nn.Module], bool]:
    """A test for modules that belong to a list which repeats their class."""
    listed: set[int] = set()
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        members = [m for m in map(unwrapped, container.children()) if can_be_block(m)]
        classes = Counter(type(m) for m in members)
        if classes and max(classes.values()) >= 2 and sum(map(size_of, members)) >= minimum:
            listed.update(id(m) for m in members)
    # A block alone in its list counts if a longer list holds blocks of its class: `noise_refiner`, a UNet level of depth 1.
    classes_listed = {type(m) for m in model.modules() if id(m) in listed}
    return lambda module: id(module) in listed or type(module) in classes_listed


def _repeated_in_mixed_lists(model: nn.Module, blocks: Iterator[tuple[str, nn.Module]]) -> set[int]:
    """Ids of list members whose class occurs twice in the model and that neither hold nor belong to a block."""
    inside: set[int] = set()
    around: set[int] = set()
    for path, block in blocks:
        inside.update(map(id, block.modules()))
        parts = path.split(".")
        around.update(id(unwrapped(model.get_submodule(".".join(parts[:i])))) for i in range(len(parts)))
    members = [
        child
        for container in model.modules()
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) and id(container) not in inside
        for child in map(unwrapped, container.children())
        if can_be_block(child) and id(child) not in inside
    ]
    holders = {type(m) for m in members if id(m) in around}
    counts = Counter(type(m).__qualname__ for m in members)
    return {id(m) for m in members if counts[type(m).__qualname__] >= 2 and type(m) not in holders}


def _outermost(module: nn.Module, path: str, wanted: Callable) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        child, child_path = unwrapped(child), f"{path}.{name}" if path else name
        if can_be_block(child) and wanted(child):
            yield child_path, child
        else:
            yield from _outermost(child, child_path, wanted)


def unwrapped(module: nn.Module) -> nn.Module:
    """A module without PyTorch's wrapper, which stays on a module that a node compiles until the host loads the model again."""
    return getattr(module, "_orig_mod", module)


def foreign_forward(block: nn.Module) -> object | None:
    """What runs instead of the class's forward: another node's forward, or that of `Module.compile`; None: nothing."""
    return given_forward(block) or block._compiled_call_impl


def can_be_block(module: nn.Module) -> bool:
    """Whether the module has a `forward` in Python, and at least two layers with weights to fuse around."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    forward = forward_of_class(type(module))
    if forward is nn.Module.forward or not isinstance(forward, types.FunctionType):
        return False
    # The host's lazily loaded Linear has `weight = None` at first.
    lazy = [m for m in module.modules() if hasattr(m, "in_features") and hasattr(m, "weight")]
    weighted = {*lazy, *(m for m in module.modules() if any(True for _ in m.named_parameters(recurse=False)))}
    return len(weighted) >= 2 and any(True for _ in module.children())


def size_of(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
