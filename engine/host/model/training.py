"""Compile the blocks of the model that a trainer makes from ours (comfy_extras/nodes_train.py, `TrainLoraNode`).

The node loads the model again from the file, and wraps its modules for gradient checkpointing before the first call. The
compiled forwards must be in the blocks by then, and stay there until training ends, since the backward runs them again.
So forwards are replaced when the trainer's model is cloned, and freed with that model.
"""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import comfy.model_patcher
import torch
from torch import nn

from ...background.model_call import ModelCall
from ...blocks.convolutions import choose
from ...compile.binding import blocks_of
from ...compile.registry import ModelCode, code_of
from ...compile.session import watching
from ...messages.report import total_of
from ...ownership import OwnForward
from ...settings import CompileSettings
from ..adapter import without_hosts_compiler
from ..weights.placement import EvenLoad, overridden
from .network_calls import raise_if_interrupted


@dataclass
class Trained:
    """The blocks of one trainer's model."""

    code: ModelCode
    settings: CompileSettings
    compiles: bool = False  # whether blocks run compiled in this step
    # `torch.get_num_threads()` on the thread that trains. On a backward's thread the number differs, and guards compare it.
    threads: int = field(default_factory=torch.get_num_threads)


# Under dynamic VRAM, a trainer's weights are loaded as a whole if they take less than this part of the free memory.
MOST_OF_MEMORY = 1 / 3
_trained: weakref.WeakKeyDictionary[nn.Module, Trained] = weakref.WeakKeyDictionary()


def train_compiled(settings: CompileSettings, patcher: Any, clone: Any) -> None:
    """An ON_CLONE callback: if the clone has another model, its blocks run compiled while gradients are enabled."""
    network = clone.model.diffusion_model
    if network is patcher.model.diffusion_model or torch.is_inference_mode_enabled():  # a copy for another GPU, for sampling
        return
    _load_as_a_whole(clone)
    trained = _trained[network] = Trained(code_of(network), settings)
    for block in choose(blocks_of(network, settings), settings).compiled:
        if "forward" not in block.__dict__:
            block.__dict__["forward"] = OwnForward(_run_trained, trained, weakref.ref(block))


def _load_as_a_whole(clone: Any) -> None:
    """Keep a trainer's weights out of dynamic VRAM, if memory allows: no block can run compiled while its weights come and go
    between forward and backward. The trainer asks for all weights on the GPU (`force_full_load`), as without dynamic VRAM, and
    has loaded the weights as a patcher without dynamic VRAM does (comfy/model_patcher.py, `clone`)."""
    paged = comfy.model_patcher.ModelPatcherDynamic
    if type(clone) not in (paged, overridden(paged, EvenLoad)):
        return
    # In a process with dynamic VRAM, weights keep the file's dtype when they are loaded, even if the model has another dtype.
    is_of_its_dtype = {p.dtype for p in clone.model.diffusion_model.parameters()} == {clone.model_dtype()}
    if is_of_its_dtype and clone.model_size() < MOST_OF_MEMORY * clone.get_free_memory(clone.load_device):
        clone.__class__ = comfy.model_patcher.ModelPatcher


def free_trained() -> None:
    """Free the models of trainings that are over. The trainer leaves them in reference cycles, and the host collects garbage
    only after the prompt: until then their weights would take the VRAM that a sampler in the same prompt needs."""
    if _trained and not comfy.model_management.in_training:
        gc.collect()


TRAINING = "Training: "  # begins each note on a trainer's calls


def begin_step(network: nn.Module, x: torch.Tensor) -> str:
    """Note that a trainer calls `network`; returns a sentence on how the blocks run."""
    trained = _trained.get(network)
    if trained is None:
        return f"{TRAINING}blocks run uncompiled while gradients are wanted, as this trainer does not copy the model."
    trained.threads = torch.get_num_threads()
    trained.compiles = all(p.device == x.device for p in network.parameters())
    if not trained.compiles:
        return (
            f"{TRAINING}blocks run uncompiled, since weights are offloaded: by the trainer's `offloading`, or, with dynamic "
            "VRAM, as they take more than a third of it or are in another dtype than the model. To train compiled, if all "
            "weights fit into VRAM, start ComfyUI with --disable-dynamic-vram."
        )
    total = total_of(trained.code.groups.values())
    if total.graph_breaks:
        return (
            f"{TRAINING}blocks run compiled, but in {total.graphs} graphs with {total.graph_breaks} breaks, so little is "
            "gained. The adapters of some algorithms (OFT) break each layer; those of LoRA and LoHa do not."
        )
    return f"{TRAINING}blocks run compiled, forwards and backwards."


def _run_trained(trained: Trained, reference: weakref.ref[nn.Module], *args: object, **kwargs: object) -> object:
    block: Any = reference()  # alive: `_run_trained` is called as the block's forward
    group = state = None
    if trained.compiles and torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
        group, state = trained.code.group_of(block, trained.settings)
    if group is None or state is None:
        return type(block).forward(block, *args, **kwargs)
    before = torch.get_num_threads()
    try:
        if before != trained.threads:
            torch.set_num_threads(trained.threads)
        with watching, without_hosts_compiler():
            inputs = tuple(map(_no_view, args)), {name: _no_view(value) for name, value in kwargs.items()}
            return group(block, state, ModelCall(True, raise_if_interrupted), *inputs)
    finally:
        if before != trained.threads:
            torch.set_num_threads(before)


def _no_view(value: Any) -> Any:
    """Clone a view: the first block's input is a view of a layer's output, and guards would require views in other blocks."""
    return value.clone() if isinstance(value, torch.Tensor) and value.requires_grad and value._is_view() else value
