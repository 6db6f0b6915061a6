"""Leave code whose graphs break where it is slower than none.

A patch or an attention override of another pack is called between two graphs of a block (transformer_options/outside.py). Where
the GPU waits for the CPU, as in SDXL with image prompts on a fast card, such code may take longer than the uncompiled block.
What steps took before does not tell: other things ran beside them. So when all code is there, calls take turns with uncompiled
ones, and the faster kind stays until new code is made.

The turns are Thue and Morse's sequence: samplers that call the model twice a step, and step caches, have rhythms of their own.
The GPU is waited for before and after each of these calls. The least seconds count, as other programs can only add to them.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ...compile.registry import ModelCode, code_of
from ...devices import seconds_when_done
from ...messages.words import told
from ...per_model import PerModel
from ...settings import CompileSettings
from ...transformer_options.filter import PATCHES
from ...transformer_options.outside import OVERRIDE

# How many calls of each kind are compared, and how many take turns for that: some are not timed.
COMPARED, MOST_TURNS = 6, 30
# Share by which compiled calls may be slower.
SAME = 0.03
# So many comparisons are kept for a network.
MOST = 8

takes_turns_on: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Comparison:
    """Seconds of calls that computed the same.

    Args:
        shape: of the latent.
        turns: how many calls have taken turns.
        slower: in words, by how much compiled calls are slower; None: they are not, or that is not known.
    """

    shape: torch.Size
    compiled: list[float] = field(default_factory=list)
    uncompiled: list[float] = field(default_factory=list)
    turns: int = 0
    slower: list | None = None

    @property
    def is_over(self) -> bool:
        return min(len(self.compiled), len(self.uncompiled)) >= COMPARED or self.turns >= MOST_TURNS

    def take_turn(self, code: ModelCode, device: torch.device, compiled: Callable, uncompiled: Callable) -> object:
        """Make a call compiled or uncompiled, and time it, unless something was made in it."""
        is_compiled = self.turns.bit_count() % 2 == 0
        self.turns += 1
        before, eager_calls, began = code.compiles, code.eager_calls, seconds_when_done(device)
        result = (compiled if is_compiled else uncompiled)()
        seconds = seconds_when_done(device) - began
        if code.compiles == before and (code.eager_calls == eager_calls) is is_compiled:
            (self.compiled if is_compiled else self.uncompiled).append(seconds)
        if self.is_over and self.compiled and self.uncompiled:
            now, without = min(self.compiled), min(self.uncompiled)
            if now > without * (1 + SAME):
                self.slower = told("slowerCompiled", f"{now / without:.2f}", f"{without:.3f}", f"{now:.3f}")
        return result


_comparisons: PerModel[dict[Hashable, Comparison]] = PerModel(lambda _network: {})


def comparison_for(network: nn.Module, settings: CompileSettings, x: torch.Tensor, options: Mapping) -> Comparison | None:
    """The comparison that concerns a call, whose code is there; None: its graphs do not break, or no call can be timed.

    Args:
        x: the latent.
        options: the call's `transformer_options`.
    """
    code, patches = code_of(network), _patches_in(options)
    groups = code.groups_of(settings)
    is_cut = any(group.stats.graph_breaks and (patches or group.code.breaks_alone) for group in groups)
    if not is_cut or code.is_being_compiled or not takes_turns_on(x.device):
        return None
    comparisons, key = _comparisons(network), (settings.settings_key(), patches, code.compiles)
    if key not in comparisons:
        comparisons[key] = Comparison(x.shape)
        for oldest in [*comparisons][:-MOST]:
            del comparisons[oldest]
    return comparisons[key]


def _patches_in(options: Mapping) -> tuple[str, ...]:
    """What of other packs, and of the host's own nodes, runs inside the network: the kinds of patches."""
    kinds = [name for kind in PATCHES for name, patch in (options.get(kind) or {}).items() if patch]
    override = options.get(OVERRIDE)
    if override is not None and not getattr(override, "reads_no_options", False):
        kinds.append(OVERRIDE)
    return tuple(sorted(kinds))
