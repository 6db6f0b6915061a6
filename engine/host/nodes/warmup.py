"""Warm up: compile for the chosen sizes before the real work starts."""

import enum
import itertools
import math
import time
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import comfy.controlnet
import torch

from ...blocks.convolutions import choose
from ...compile.binding import blocks_of
from ...compile.registry import code_of
from ...notices.recompile_log import warming, watch_of
from ...notices.report import CompileReport, WarmedSize, groups_for, stats_for
from ...notices.words import say, say_in_english
from ...per_model import Same
from ...settings import CompileSettings
from ...torch_settings import numerics
from ...user_input import check_model, check_sampling
from ..adapter import is_dynamic
from ..model.attach import KEY, Nothing, compile_plan, diffusion_model, model_name, notes_about, settings_for
from ..model.controlnet import controls_in
from ..model.network_calls import raise_if_interrupted
from .progress import WarmupProgress
from .sampling import STEPS, labelled_latent, latent_shape, naming_the_size, ranges_of, sample_once
from .warmup_plan import MemoryPeaks, Size

MAX_REMEMBERED = 200  # runs of the sampler, per model
# Stands for all lengths of the prompts, once a second length has compiled nothing: a third will not either.
SETTLED = "any length"
# Attributes of a patcher that can change compiled code. Values of weight patches cannot: blocks see plain weights.
_PATCHER = ("object_patches", "weight_wrapper_patches", "injections", "wrappers", "callbacks", "attachments")
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


def warm_up(
    patcher,
    positive: list,
    negative: list,
    cfg: float,
    sizes: list[Size],
    latent: dict | None = None,
    node_id: str | None = None,
) -> str:
    """Run the sampler at every size that is not warm yet, and report what was compiled; `latent` replaces the first size.

    Raises:
        InvalidSetting: an input cannot be sampled, or the model cannot take a size.
    """
    check_model(patcher)
    check_sampling(positive, negative, cfg, latent)
    settings = settings_for(patcher, Nothing(say("nothingToWarm"), say_in_english("nothingToWarm")))
    if isinstance(settings, Nothing):
        return settings.text
    for index, size in enumerate(sizes):  # before the first run, so that a wrong size costs no waiting
        if index or latent is None:
            latent_shape(patcher, size, is_extra=index > 0)
    return _Warmup(patcher, settings, (positive, negative), cfg).run(sizes, latent, node_id)


class _Warmup:
    """Run the node once."""

    def __init__(self, patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float):
        self.patcher, self.settings, self.conditioning, self.cfg = patcher, settings, conditioning, cfg
        self.model = diffusion_model(patcher)
        self.code = code_of(self.model)
        self.report = CompileReport(model_name(patcher), settings, compile_plan(patcher, settings), [])
        # Whether prompt and negative have run apart from each other, for batches of one (True) and of more.
        self.apart: set[bool] = set()
        self.steps = STEPS

    def run(self, sizes: list[Size], latent: dict | None, node_id: str | None) -> str:
        paged = self.patcher.loaded_size if is_dynamic(self.patcher) else int
        memory = MemoryPeaks(self.patcher.load_device, paged)
        in_each = STEPS * ranges_of(self.conditioning)
        classes = list(dict.fromkeys(block.class_name for block in self.report.plan.blocks))
        mask = latent.get("noise_mask") if latent else None
        with WarmupProgress(len(sizes), in_each, classes, self.settings.backend == "inductor", node_id) as progress:
            for index, size in enumerate(sizes):  # many large latents at once are beyond memory
                label, prepared = labelled_latent(self.patcher, size, latent if index == 0 else None)
                raise_if_interrupted()
                progress.begin(label, index)
                with warming(), naming_the_size(label, self.report.model_name):
                    self._at_size(label, {**prepared, "noise_mask": mask}, progress.step)
                progress.end(index)
        self.report.groups, self.report.parts = groups_for(self.model, self.settings), self.code.parts
        self.report.taken = self.code.taken
        self.report.notes += notes_about(self.patcher)
        controls = controls_in([entry for prompts in self.conditioning for entry in prompts])
        self.report.notes += [line for control in controls for line in control.notes()]
        if any(size.added.graphs for size in self.report.sizes):
            self.report.notes.append(memory.text())
        self.report.notes += [say("outside", sentence) for sentence in watch_of(self.model).notices]
        return self.report.text()

    def _at_size(self, label: str, latent: dict, on_step: Callable[[], None]) -> None:
        """Sample, unless the same was sampled before and PyTorch still has all the code that existed then."""
        began, before = time.perf_counter(), stats_for(self.model, self.settings)
        run, lengths = fingerprint(self.patcher, self.settings, self.conditioning, self.cfg, latent)
        another_length = self.settings.dynamic != "false" and self._is_warm(run) and not self._is_warm((run, lengths))
        # Not where code depends on where the weights are, or where unloading the model drops CUDA graphs.
        may_skip = self.settings.block_swap != "uncompiled linears" and not self.settings.wants_graphs
        may_skip = may_skip and self._blocks_are_as_they_ran()
        skipped = may_skip and (self._is_warm((run, lengths)) or self._is_warm((run, SETTLED)))
        if skipped:
            self.code.note_taken(())  # nor were there any in the run that is in `warm`
        else:
            self._sample_at(latent, on_step)
        added = stats_for(self.model, self.settings) - before
        if not skipped and not self.code.taken:
            runs = [run, (run, lengths), *([(run, SETTLED)] if another_length and not added.graphs else [])]
            self.code.warm.update(dict.fromkeys(runs, self._guards()))
            for oldest in list(self.code.warm)[:-MAX_REMEMBERED]:
                del self.code.warm[oldest]
        self.apart.add(latent["samples"].shape[0] == 1)
        self.report.sizes.append(WarmedSize(label, time.perf_counter() - began, added, skipped))

    def _is_warm(self, run: Hashable) -> bool:
        return run in self.code.warm and self.code.warm[run] <= self._guards()

    def _sample_at(self, latent: dict, on_step: Callable[[], None]) -> None:
        uncompiled = self.code.eager_calls
        calls = sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step)
        if self.code.eager_calls != uncompiled:  # the attention was measured
            calls = sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step)
        if calls.early:  # else the run says nothing about whether the model's second call needs other code
            self.steps = STEPS if calls.late else 1
        # With shared code one size stands for all.
        if calls.joined and (self.settings.dynamic == "false" or (latent["samples"].shape[0] == 1) not in self.apart):
            sample_once(self.patcher, self.conditioning, self.cfg, latent, on_step, each_prompt_alone=True, steps=self.steps)

    def _blocks_are_as_they_ran(self) -> bool:
        blocks = choose(blocks_of(self.model, self.settings), self.settings).compiled
        return all(self.code.is_as_it_ran(block, self.settings) for block in blocks)

    def _guards(self) -> set[Same]:
        """The guards of all compiled code that PyTorch holds for the model."""
        return {Same(guard) for group in groups_for(self.model, self.settings) for guard in group.code.variants()}


def fingerprint(
    patcher, settings: CompileSettings, conditioning: tuple[list, list], cfg: float, latent: dict
) -> tuple[Hashable, tuple[int, ...]]:
    """A run of the sampler as a key without the lengths of its prompts, and these lengths: equal runs need the same code.

    The key tells which lengths are equal, and which can run as one batch. Objects that cannot be compared by content are
    compared by identity: a doubt costs a run, and never a compilation later.
    """
    others = [p.model for patchers in getattr(patcher, "additional_models", {}).values() for p in patchers]
    about_model = [getattr(patcher, name, None) for name in _PATCHER]
    about_model += [patcher.model_options, others, patcher.load_device, patcher.model.get_dtype_inference()]
    about_torch = (  # torch/_dynamo/guards.py, global state
        *(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled()),
        *(torch.get_default_dtype(), torch.get_num_threads(), *numerics()),
    )
    sampled = conditioning[:1] if cfg == 1.0 else conditioning  # ComfyUI leaves the negative prompt out then
    embeddings = (entry[0] for entries in sampled for entry in entries)  # `[batch, tokens, channels]`
    lengths = tuple(e.shape[1] for e in embeddings if isinstance(e, torch.Tensor) and e.ndim == 3)
    names = {length: f"length {at}" for at, length in enumerate(dict.fromkeys(lengths)) if length > 1}
    # ComfyUI repeats a prompt at most four times to run it with a longer one (comfy/conds.py, `CONDCrossAttn.can_concat`).
    batches = tuple(math.lcm(a, b) > 4 * min(a, b) for a, b in itertools.combinations(lengths, 2) if a != b)
    described = _described([about_model, list(latent.values())], {}), _described(conditioning, names)
    return (settings, about_torch, frozenset(patcher.patches), cfg == 1.0, described, batches), lengths


def _described(value: Any, names: Mapping[int, str]) -> Hashable:
    """Tensors by their shapes, with `names` in place of some sizes; other objects by identity."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if getattr(value, "is_nested", False):  # of PyTorch or of the host (comfy/nested_tensor.py)
        return "nested", *(_described(part, names) for part in value.unbind())
    if isinstance(value, torch.Tensor):
        return tuple(names.get(size, size) for size in value.shape), value.dtype, value.device, value.is_contiguous()
    if isinstance(value, comfy.controlnet.ControlBase):  # copied at each execution of its node
        return type(value), _described(vars(value), names)
    if isinstance(value, Mapping):  # without this pack's wrappers, which are new objects each time the node runs
        return "mapping", *((_described(name, {}), _described(item, names)) for name, item in value.items() if name != KEY)
    if isinstance(value, list | tuple | set | frozenset):
        return "items", *(_described(item, names) for item in value)
    if isinstance(value, types.MethodType):  # a new object at each access
        return Same(value.__self__), Same(value.__func__)
    return Same(value)
