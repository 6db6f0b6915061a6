"""Choose which blocks of a UNet are compiled.

Fusing saves little for convolutions and the smallest images, compared with the seconds that each graph takes to compile (SDXL:
14 graphs for all blocks, 2 for those that matter). Transformers are compiled whole. The choice is the same for all sizes, so
that a size that was not warmed up needs no other code.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ..per_model import PerModel
from ..settings import CompileSettings
from .discovery import can_be_block, foreign_forward, size_of

# A kind of blocks is not compiled if its blocks process less than this share of the largest kind's elements in a model call.
SHARE = 0.4
_IMAGES = (nn.GroupNorm, nn.Conv2d, nn.Conv3d)


def _mostly_convolutions(block: nn.Module) -> bool:
    layers = [m for m in block.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    convolutions = sum(p.numel() for m in layers for p in m.parameters())
    return 2 * convolutions > size_of(block)


def _parts(block: nn.Module) -> tuple[str, ...]:
    if not any(isinstance(child, _IMAGES) for child in block.children()):
        return ()
    lists = [(name, child) for name, child in block.named_children() if isinstance(child, nn.ModuleList)]
    paths = [f"{name}.{i}" for name, members in lists for i, member in enumerate(members) if can_be_block(member)]
    return tuple(paths) if 2 * sum(size_of(block.get_submodule(path)) for path in paths) > size_of(block) else ()


# Whether most weights of a block are those of convolutions.
is_convolutional = PerModel(_mostly_convolutions)
# The paths of the transformers in a block of images (SD 1.5's SpatialTransformer); none unless they hold most weights.
_parts_of = PerModel(_parts)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The transformers in a block of images; none where another node has taken one away."""
    try:
        return [block.get_submodule(path) for path in _parts_of(block)]
    except AttributeError:
        return []


class Choice(NamedTuple):
    """What is compiled of blocks of a model: some blocks are replaced by their parts, others run eager."""

    compiled: list[nn.Module]
    parts: list[nn.Module]
    left_out: list[nn.Module]


def choose(blocks: list[nn.Module], settings: CompileSettings) -> Choice:
    """Leave out blocks of convolutions, unless the settings want them compiled or there are no others.

    A part that another node has given a forward is left out, and its block is not compiled whole.
    """
    choice, compiles_all = Choice([], [], []), settings.compiles_convolutions or all(map(is_convolutional, blocks))
    for block in blocks:
        inside = parts_of(block)
        free = [part for part in inside if foreign_forward(part) is None]
        if inside and (len(free) < len(inside) or not compiles_all):
            choice.parts.extend(free)
            choice.compiled.extend(free)
        else:
            (choice.compiled if compiles_all or not is_convolutional(block) else choice.left_out).append(block)
    return choice


# Class and size of a block: blocks of one kind share graphs.
kind_of = PerModel(lambda block: (type(block).__name__, size_of(block)))


@dataclass
class Effort:
    """Which kinds of blocks are worth a graph, in one call of a UNet.

    Args:
        blocks: how many blocks there are, by `kind_of`.
        left_out: class names of blocks that are too small, by `id`.
    """

    blocks: Counter[tuple[str, int]]
    left_out: dict[int, str] = field(default_factory=dict)
    _small: dict[tuple[str, int], bool] = field(default_factory=dict)
    _most: int = 0

    def is_too_small(self, block: nn.Module, args: tuple) -> bool:
        """Whether `block` should run eager: decided when the first of its kind runs, by comparison with earlier kinds."""
        key = kind_of(block)
        if key not in self._small:
            work = next((a.numel() for a in args if isinstance(a, torch.Tensor)), self._most) * self.blocks[key]
            self._small[key] = work < SHARE * self._most
            self._most = max(self._most, work)
        if self._small[key]:
            self.left_out[id(block)] = type(block).__name__
        return self._small[key]
