"""Free the memory of CUDA graphs when the host's models need it, and that of idle models when a capture or a replay needs it.

A graph keeps the memory for its call's intermediates (SDXL at batch 1: 0.6 GiB), also while its model is idle, and PyTorch
counts most of that memory as free. With cudaMallocAsync that memory is the driver's, for which dynamic VRAM evicts no page:
when pages of idle models fill the card, a capture fails, and so does a replay if the driver has reused the graph's memory. When
graphs leave too little memory for pages, nothing fails: weights are streamed.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from torch import nn

from ...cuda_graphs.capture import ModelGraphs, graphs_of
from ...failures.describe import in_one_line
from ...log import logger
from ...ownership import is_ours
from ..weights.blocks import Loaded


def is_short_of_memory(device: torch.device) -> bool:
    """Whether the models that run leave less than a quarter of the card's memory free."""
    return device.type == "cuda" and _free_beside_models(device) < torch.cuda.mem_get_info(device)[1] / 4


def _free_beside_models(device: torch.device) -> float:
    """Free bytes once all weights of the models being sampled are in memory; pages of idle models count as free."""
    if device.type != "cuda":
        return math.inf
    free = torch.cuda.mem_get_info(device)[0]
    for patcher, pages, runs in _loaded(device):
        if pages is not None and not runs:
            free += pages.loaded_size()
        elif pages is not None and hasattr(patcher.model, "diffusion_model"):  # a text encoder runs once
            free += pages.loaded_size() - pages.offset
    return free


def _loaded(device: torch.device) -> Iterator[tuple[Any, Any, bool]]:
    """Each patcher that the host has loaded, with its pages of dynamic VRAM or None, and whether it runs. `currently_used` does
    not suffice: a guider of two models loads one after the other, and the decoder of a preview is loaded in between."""
    for one in comfy.model_management.current_loaded_models:
        patcher = one.model
        if patcher is not None and one.device == device:
            runs = one.currently_used or getattr(patcher.model, "current_patcher", None) is not None
            yield patcher, getattr(patcher.model, "dynamic_vbars", {}).get(device), runs


def _idle_graphs(device: torch.device) -> list[tuple[nn.Module, ModelGraphs]]:
    """The graphs of idle models, by network. A ControlNet's patcher holds the network itself."""
    running = [getattr(patcher.model, "diffusion_model", patcher.model) for patcher, _pages, runs in _loaded(device) if runs]
    of_device = [(network, graphs) for network, graphs in graphs_of.items() if graphs.model.device == device]
    holding = [(network, graphs) for network, graphs in of_device if graphs.hold_memory]
    return [(network, graphs) for network, graphs in holding if not any(network is other for other in running)]


def _never_fails(function: Callable[..., bool]) -> Callable[..., bool]:
    """Log errors of `function` and return False: without the memory the prompt goes on."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            logger.warning("the memory of CUDA graphs: %s", in_one_line(error))
            return False

    return run


@_never_fails
def make_room(loaded: Loaded, inputs: tuple, beside: int = 0) -> bool:
    """Free memory for a capture or a replay: first PyTorch's cache, then pages, then graphs of idle models. A graph takes about
    the host's estimate for a call (comfy/model_base.py, `memory_required`); the first tensor of `inputs` is the latent. Returns
    whether that much is free, plus `beside` bytes, plus the host's reserve (`minimum_inference_memory`)."""
    device = loaded.device
    if device.type != "cuda":
        return True
    estimate = getattr(loaded.model, "memory_required", None)  # a ControlNet has none
    shape = next((value.shape for value in inputs if isinstance(value, torch.Tensor)), None)
    needed = comfy.model_management.minimum_inference_memory() + beside + (estimate(shape) if estimate and shape else 0)

    def lack() -> float:
        return needed - torch.cuda.mem_get_info(device)[0]

    if lack() > 0:
        comfy.model_management.soft_empty_cache()
    idle_pages = [pages for _patcher, pages, runs in _loaded(device) if pages is not None and not runs]
    idle_graphs = [(network, graphs) for network, graphs in _idle_graphs(device) if network is not loaded.network]
    if not idle_graphs and lack() > sum(pages.loaded_size() for pages in idle_pages):
        return False  # the pages would have to be filled again, for nothing
    for pages in idle_pages:
        if (bytes_lacking := lack()) > 0:
            pages.free_memory(min(bytes_lacking, pages.loaded_size()))
    for _network, graphs in idle_graphs:
        if lack() > 0:
            graphs.drop()
            comfy.model_management.soft_empty_cache()  # what `drop` has freed to PyTorch's cache
    return lack() <= 0


def watch_unloading() -> None:
    """While any model has graphs, wrap the host's functions that load and unload models: drop the graphs of models that are
    unloaded, in part or as a whole, and the graphs of idle models when the models being loaded lack memory.

    ON_DETACH callbacks do not suffice: the host calls those of the patcher that loaded the model last. If our node is bypassed,
    or is in another branch of the workflow, that patcher has no callback of this pack. Under dynamic VRAM a model's pages keep
    their addresses when the host evicts them, and no model is unloaded for another.
    """
    patchers, management, all_graphs = comfy.model_patcher.ModelPatcher, comfy.model_management, graphs_of

    # At exit, when the host deletes patchers, this module's globals are gone: these functions use none.
    def drop_of_unloaded(_result, patcher, unpatch_all=True):
        if unpatch_all:
            for network, graphs in all_graphs.items():
                if network is patcher.model or network is getattr(patcher.model, "diffusion_model", None):
                    graphs.drop()

    def drop_of_moved(freed, patcher, *_args, **_kwargs):
        drop_of_unloaded(freed, patcher, unpatch_all=freed)

    def watch(owner, name, hosts, drop):
        """Wrap the host's function; again if another pack has replaced our wrapper."""
        if is_ours(hosts):
            return

        @functools.wraps(hosts)
        def watched(*args, **kwargs):
            result = hosts(*args, **kwargs)
            drop(result, *args, **kwargs)
            is_needed = any(graphs.hold_memory for _, graphs in all_graphs.items())
            if getattr(owner, name) is watched and not is_needed:
                setattr(owner, name, hosts)
            return result

        setattr(owner, name, watched)

    watch(patchers, "detach", patchers.detach, drop_of_unloaded)
    watch(patchers, "partially_unload", patchers.partially_unload, drop_of_moved)
    watch(management, "load_models_gpu", management.load_models_gpu, _drop_of_idle)


@_never_fails
def _drop_of_idle(_result, models=(), *_args, **_kwargs) -> bool:
    """Drop graphs of idle models if the models just loaded lack memory. The host's estimate for these does not count: a VAE's
    is gigabytes, but the VAE runs once, and evicts pages or decodes in tiles."""
    required = comfy.model_management.minimum_inference_memory()
    for device in {patcher.load_device for patcher in models}:
        idle = _idle_graphs(device)
        if idle and _free_beside_models(device) < required:
            comfy.model_management.soft_empty_cache()
            if _free_beside_models(device) < required:
                for _network, graphs in idle:
                    graphs.drop()
                comfy.model_management.soft_empty_cache()
    return True
