"""The memory that CUDA graphs hold: free it where the host's models need it.

A graph keeps the memory that its call computes in (SDXL at batch 1: 0.8 GiB), also while its model does not run. PyTorch counts
most of that as free, and dynamic VRAM does not run out of memory: it would stream the weights of other models instead.
"""

import functools
import math

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP

from ...cuda_graphs.capture import graphs_of
from ...ownership import is_ours
from ..adapter import KEY
from ..weights.blocks import Loaded


def is_short_of_memory(device: torch.device) -> bool:
    """Whether less than a quarter of a card's memory is left beside the models in use."""
    return device.type == "cuda" and _free_beside_models(device) < torch.cuda.mem_get_info(device)[1] / 4


def _free_beside_models(device: torch.device | None) -> float:
    """Bytes that are free once all weights of the models in use are in memory.

    Pages of dynamic VRAM count as free, as models that are not in use give them up, and weights in pages as used. What PyTorch
    keeps for itself counts as used: it may be a graph's.
    """
    if device is None or device.type != "cuda":
        return math.inf
    free = torch.cuda.mem_get_info(device)[0]
    if not comfy.memory_management.aimdo_enabled:
        return free
    import comfy_aimdo.model_vbar

    paged = (model for model in _in_use(device) if model.is_dynamic())
    return free + comfy_aimdo.model_vbar.vbars_analyze(device.index) - sum(model.model_size() for model in paged)


def _in_use(device: torch.device) -> list[comfy.model_patcher.ModelPatcher]:
    """The patchers that the host has loaded last."""
    loaded = comfy.model_management.current_loaded_models
    return [one.model for one in loaded if one.currently_used and one.device == device and one.model is not None]


def make_room(loaded: Loaded, inputs: tuple) -> None:
    """Have the host take memory from models that do not run, for the capture of a call; the first tensor of `inputs` is the
    latent.

    With cudaMallocAsync a graph's memory is the driver's: dynamic VRAM gives no page up for it, and pages of other models fill
    the card. A graph is no larger than the host's estimate of what a call needs (comfy/model_base.py, `memory_required`).
    """
    if loaded.device.type != "cuda":
        return
    management = comfy.model_management
    estimate = getattr(loaded.model, "memory_required", None)  # a ControlNet has none
    shape = next((value.shape for value in inputs if isinstance(value, torch.Tensor)), None)
    needed = management.minimum_inference_memory() + (estimate(shape) if estimate and shape else 0)
    if torch.cuda.mem_get_info(loaded.device)[0] < needed:
        in_use = [one for one in management.current_loaded_models if one.currently_used]
        management.free_memory(needed, loaded.device, keep_loaded=in_use)


def watch_unloading() -> None:
    """Wrap what the host loads and unloads models with, until no model has graphs any more: graphs of models that are unloaded,
    in part or as a whole, are dropped, and those of idle models where the ones that are loaded lack memory.

    ON_DETACH callbacks do not suffice: the host calls those of the patcher that loaded the model last. If our node is bypassed,
    or is in another branch of the workflow, that patcher has no callback of this pack. Under dynamic VRAM a model's pages stay
    in their places when the host takes memory from it, and no model is unloaded for another.
    """
    patchers, management, all_graphs = comfy.model_patcher.ModelPatcher, comfy.model_management, graphs_of

    # At exit, when the host deletes patchers, this module's names are gone: these functions use none.
    def drop_of_unloaded(_result, patcher, unpatch_all=True):
        if unpatch_all:
            for network, graphs in all_graphs.items():
                if network is patcher.model or network is getattr(patcher.model, "diffusion_model", None):
                    graphs.drop()

    def drop_of_moved(freed, patcher, *_args, **_kwargs):
        drop_of_unloaded(freed, patcher, unpatch_all=freed)

    def watch(owner, name, hosts, drop):
        """Wrap the host's function, again where another pack has replaced the wrapper."""
        if is_ours(hosts):
            return

        @functools.wraps(hosts)
        def watched(*args, **kwargs):
            result = hosts(*args, **kwargs)
            drop(result, *args, **kwargs)
            if getattr(owner, name) is watched and not any(graphs.graphs for _, graphs in all_graphs.items()):
                setattr(owner, name, hosts)
            return result

        setattr(owner, name, watched)

    watch(patchers, "detach", patchers.detach, drop_of_unloaded)
    watch(patchers, "partially_unload", patchers.partially_unload, drop_of_moved)
    watch(management, "load_models_gpu", management.load_models_gpu, _drop_of_idle)


def _drop_of_idle(_result, _models, memory_required: float = 0, *_args, **_kwargs) -> None:
    """Drop graphs that hold memory which the models lack that have just been loaded: graphs of other models, and of those that
    run without our node now."""
    required = max(memory_required, comfy.model_management.minimum_inference_memory())
    with_graphs = [(network, graphs) for network, graphs in graphs_of.items() if graphs.graphs]
    for device in {graphs.model.device for _network, graphs in with_graphs}:
        if _free_beside_models(device) < required:
            kept = [*map(_compiled_network, _in_use(device))]
            for network, graphs in with_graphs:
                if graphs.model.device == device and not any(network is other for other in kept):
                    graphs.drop()


def _compiled_network(patcher: comfy.model_patcher.ModelPatcher) -> object | None:
    """What may have graphs: a ControlNet's patcher holds the network itself, and has no wrapper of ours."""
    network = getattr(patcher.model, "diffusion_model", patcher.model)
    return network if network is patcher.model or patcher.get_wrappers(WrappersMP.APPLY_MODEL, KEY) else None
