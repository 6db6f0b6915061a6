"""Run a model's calls uncompiled where graph breaks make compiled calls slower than uncompiled ones.

A patch or an attention override of another pack is called between two graphs of a block (transformer_options/outside.py). Where
the GPU waits for the CPU, as in SDXL with image prompts on a fast card, a block with graph breaks may take longer than
uncompiled. Seconds of earlier steps do not tell, as other work ran beside those steps. So when all code is there, compiled and
uncompiled calls take turns, and the faster kind stays until new code is made.

The order of turns is the Thue-Morse sequence: samplers that call the model twice a step have a period of their own. The GPU is
synchronized before and after each of these calls. The shortest call of each kind counts, as other programs can only add time.
Nothing is compared where a wrapper or a forward of another node may skip the blocks, as step caches do.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from ...cache.structure import name_of
from ...compile.call_shapes import shapes_of
from ...compile.registry import ModelCode, code_of
from ...devices import seconds_when_done
from ...messages.words import told
from ...ownership import given_forward
from ...per_model import PerModel
from ...settings import CompileSettings
from ...transformer_options.outside import OVERRIDE
from ..graphs.policy import forget_last_call
from .attention_choice import OPTIONS_AT
from .observer import patches_in

# How many calls of each kind are compared, and how many calls take turns at most, as some are not timed.
COMPARED, MOST_TURNS = 6, 30
# Share by which compiled calls may be slower.
SAME = 0.03
# The most comparisons that are kept; the least recently used are evicted.
MOST = 64

takes_turns_on: Callable[[torch.device], bool] = lambda device: device.type == "cuda"  # noqa: E731


@dataclass
class Comparison:
    """Seconds of calls with the same inputs.

    Args:
        inputs: shapes of the first call's conditioning; calls with other shapes take no turns.
        turns: how many calls have taken turns.
        slower: in words, by how much compiled calls are slower; None: they are not slower, or not compared yet.
    """

    inputs: Hashable
    compiled: list[float] = field(default_factory=list)
    uncompiled: list[float] = field(default_factory=list)
    turns: int = 0
    slower: list | None = None

    @property
    def is_over(self) -> bool:
        return self._is_decided or self.turns >= MOST_TURNS

    @property
    def _is_decided(self) -> bool:
        return min(len(self.compiled), len(self.uncompiled)) >= COMPARED

    def take_turn(self, code: ModelCode, device: torch.device, compiled: Callable, uncompiled: Callable) -> object:
        """Run a call compiled or uncompiled. Its seconds count unless code was made in it, or blocks ran the other way."""
        is_compiled = self.turns.bit_count() % 2 == 0
        self.turns += 1
        code.mixed += 1  # the call's step counts neither as compiled nor as uncompiled
        before, eager_calls, began = code.compiles, code.eager_calls, seconds_when_done(device)
        result = (compiled if is_compiled else uncompiled)()
        seconds = seconds_when_done(device) - began
        if code.compiles == before and (code.eager_calls == eager_calls) is is_compiled:
            (self.compiled if is_compiled else self.uncompiled).append(seconds)
        if not is_compiled:
            forget_last_call(device)
        if self._is_decided:
            now, without = min(self.compiled), min(self.uncompiled)
            if now > without * (1 + SAME):
                self.slower = told("slowerCompiled", f"{now / without:.2f}", f"{without:.3f}", f"{now:.3f}")
        return result


# By structure, as ComfyUI may free a model after each prompt.
_comparisons: dict[Hashable, Comparison] = {}
_name_of: PerModel[str] = PerModel(name_of)


def comparison_for(network: nn.Module, settings: CompileSettings, args: tuple, kwargs: dict) -> tuple[Comparison | None, bool]:
    """The comparison for a call `apply_model(*args, **kwargs)`, and whether the call may take a turn. None: the call has no
    graph breaks, its code is not all there, or calls cannot be compared."""
    x, options, code = args[0], args[OPTIONS_AT], code_of(network)
    patches, groups = _patches_in(options), code.groups_of(settings)
    is_cut = any(group.stats.graph_breaks and (patches or group.code.breaks_alone) for group in groups)
    may_skip = bool((options.get("wrappers") or {}).get(WrappersMP.DIFFUSION_MODEL)) or given_forward(network) is not None
    if not is_cut or may_skip or code.is_being_compiled or not takes_turns_on(x.device):
        return None, False
    has_control, inputs = args[4] is not None, shapes_of(args[2:4], kwargs)
    key = _name_of(network), x.device, x.shape, has_control, settings.settings_key(), patches, code.compiles
    comparison = _comparisons.pop(key) if key in _comparisons else Comparison(inputs)
    _comparisons[key] = comparison  # newest last
    if len(_comparisons) > MOST:
        _comparisons.pop(next(iter(_comparisons)), None)
    return comparison, comparison.inputs == inputs and not comparison.is_over


def _patches_in(options: Mapping) -> tuple[str, ...]:
    """Kinds of patches, of other packs and of the host's own nodes, inside the network; OVERRIDE if attention is overridden."""
    override = options.get(OVERRIDE)
    is_ours = override is None or getattr(override, "reads_no_options", False)
    return patches_in(options) if is_ours else (*patches_in(options), OVERRIDE)
