"""Compile the models of a workflow for a card that is not here; prebuild.py is the command line.

1. fake_card.py answers for the card. ComfyUI is started as its main.py does it, with its nodes and this pack, but serves nobody.
2. Weights are tensors without memory, of which files give shape and dtype (`_load`). Where dynamic VRAM is on with a card, weights
   lie in its pages (`_Pages`): the name of code tells where in a page a bias lies.
3. The workflow runs as far as its samplers, and each of them calls its model twice (`_sample`).
4. A graph that was traced goes to the compile process and its code into the store, as ever. The code is not loaded: the graph
   that was sent runs in its place (`_lower`).
"""

import functools
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.samplers
import comfy.utils
import torch

from ...cache.archive import write_cache_file
from ...cache.code_store import CodeStore
from ...cache.structure import name_of
from ...compile import traced_graph
from ...compile.registry import live_models
from ...compile_process import obtain, wire
from ...errors import TorchCompileKitError
from ...inductor import attention_kernels
from ...notices.recompile_log import warming
from ...torch_compat import fake_card
from ..model import structure_record
from ..model.user_folder import open_users_store
from ..weights import partial_load
from .cache_files import pack_version
from .sampling import STEPS

MODEL_NODE = "TorchCompileKitModel"
# Smaller tensors of a file are read: scales, and what a file says of its formats.
READ_BYTES = 4096
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}


class PrebuildError(TorchCompileKitError):
    """Say what cannot be prebuilt, and what to do."""


def samplers_of(workflow: Any, name: str, outputs_latent: Callable[[str], bool]) -> list[str]:
    """The nodes of a workflow behind Torch Compile that make a latent: they sample, or work on what was sampled.

    Args:
        outputs_latent: by the class of a node.

    Raises:
        PrebuildError: it is no workflow, or has no such node.
    """
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        raise PrebuildError(f"{name} is a workflow as the page saves it; export it with Workflow > Export (API).")
    if not isinstance(workflow, dict) or not all(isinstance(node, dict) and "class_type" in node for node in workflow.values()):
        raise PrebuildError(f"{name} is no workflow; export one with Workflow > Export (API).")
    behind = {node for node, about in workflow.items() if about["class_type"] == MODEL_NODE}
    if not behind:
        raise PrebuildError(f"{name} has no node Torch Compile; put one behind the model that is to be compiled.")
    makers = {node for node, about in workflow.items() if outputs_latent(about["class_type"])}
    while new := {node for node in workflow.keys() - behind if (behind - makers) & set(_linked(workflow[node]))}:
        behind |= new
    if not (samplers := sorted(behind & makers)):
        raise PrebuildError(f"{name} has no sampler behind Torch Compile; connect one.")
    return samplers


def _linked(node: dict) -> Iterator[str]:
    """The nodes that a node has inputs from."""
    yield from (str(value[0]) for value in node.get("inputs", {}).values() if isinstance(value, list) and len(value) == 2)


def stand_in_for_host(mode: Any, attention: str) -> None:
    """Have ComfyUI, and this pack, do without the card what would read its memory or measure on it, until the process ends.

    Args:
        mode: of `fake_card.begin`.
        attention: the kernel that is the fastest wherever it can run; `comfyui` for the host's choice.
    """
    partial_load.KNOWN.add(type(fake_card.weight(mode, (), torch.float32)))
    comfy.utils.load_torch_file = functools.partial(_load, mode, comfy.utils.load_torch_file)
    comfy.samplers.KSAMPLER.sample = _sample
    comfy.model_management.NUM_STREAMS = 0
    attention_kernels._can_run = lambda name, *tensors: fake_card.can_run(name, *tensors)
    attention_kernels._measure = functools.partial(_seconds, attention)
    structure_record._write_later = lambda _write: None  # seconds of this machine


def _load(mode: Any, host: Callable, ckpt: str, *args: Any, **kwargs: Any) -> Any:
    """In place of `comfy.utils.load_torch_file`: of a safetensors file the header, and small tensors, are read."""
    if not str(ckpt).lower().endswith((".safetensors", ".sft")):
        return host(ckpt, *args, **kwargs)
    with open(ckpt, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, tensors = json.loads(file.read(size)), {}
        about = header.pop("__metadata__", {})
        for name, entry in header.items():
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES[entry["dtype"]]
            if 0 < end - begin <= READ_BYTES:
                file.seek(8 + size + begin)
                content = bytearray(file.read(end - begin).ljust(end - begin, b"\0"))
                tensors[name] = torch.frombuffer(content, dtype=dtype).view(shape)
            else:
                tensors[name] = fake_card.weight(mode, shape, dtype)
    return (tensors, about) if kwargs.get("return_metadata") else tensors


def _sample(_self: Any, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, *_: Any, **__: Any):
    """In place of `KSAMPLER.sample`: the calls that trace, with no step in between."""
    model = comfy.samplers.KSamplerX0Inpaint(model_wrap, sigmas)
    model.latent_image, model.noise = latent_image, noise
    for sigma in sigmas[:STEPS]:
        model(noise, sigma * noise.new_ones(noise.shape[0]), **{**extra_args, "denoise_mask": denoise_mask})
    return noise


def _seconds(preferred: str, kernel: str, call: tuple) -> float:
    """In place of a measurement of attention."""
    tensors = [None if spec is None else spec.zeros() for spec in call[:4]]
    return (0.5 if kernel == preferred else 1.0) if fake_card.can_run(kernel, *tensors) else float("inf")


class _Lowered:
    """In place of `traced_graph.LOWERERS["inductor"]`, which loads the code onto the card.

    Args:
        tell: is told of each graph.
    """

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self.graphs: dict[str, Any] = {}
        self.failures: list[str] = []

    def __call__(self, request: obtain.Request, block: str, _patient: bool) -> traced_graph.Lowered:
        began, name, guards, was_kept = time.perf_counter(), None, None, False
        try:
            if request.measures:
                raise PrebuildError("its mode measures kernels on the card; set mode to auto")
            obtained = obtain.obtain(request, block, False)
            name, guards, was_kept = obtained.name, obtained.code.guards, obtained.was_kept
            size = f"{len(obtained.code.artefact) / 2**20:.1f} MiB"
            seconds = "was there" if was_kept else f"{time.perf_counter() - began:.1f} s"
            self._tell(f"{len(self.graphs) + 1}. {block}: {size}, {seconds}, {obtained.name[:12]}")
            self.graphs[obtained.name] = request
        except Exception as error:
            self.failures.append(f"{block}: {error}")
            self._tell(f"-. {self.failures[-1]}")
        graph, _inputs, _mode = wire.loads(json.loads(request.text)["graph"])
        return traced_graph.Lowered(graph.forward, guards, name, was_kept)
