"""Compile the models of a workflow for a card that is not here; prebuild.py is the command line.

1. fake_card.py stands in for the card. ComfyUI is started as by its main.py, without dynamic VRAM, but answers no requests.
2. Weights are tensors without memory, whose shapes and dtypes are read from files (`_load`).
3. The workflow runs as far as its samplers, and each of them makes only the calls of its model that trace (`_sample`).
4. A traced graph goes to the compile process, and its code into the store. Loading the code would need the card, so the
   graph itself runs in place of its code (`_Lowering`).

Prompts on the card itself ask for code by the same name, as long as they trace the same graphs. So the attention kernel is kept
with the code: a server finds the kernel there, and does not measure (host/model/attention_choice.py).
"""

import functools
import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.samplers
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ... import attention_kernels
from ...cache.archive import write_cache_file
from ...cache.environment import environment
from ...cache.structure import name_of
from ...compile import traced_graph
from ...compile.registry import live_models
from ...compile_process import obtain, wire
from ...compile_process.artefact import Code
from ...errors import TorchCompileKitError
from ...messages.recompile_log import warming
from ...torch_compat import fake_card
from ..model import structure_record
from ..model.user_folder import open_users_store
from ..weights import partial_load
from .cache_files import pack_version
from .sampling import KEY, STEPS, one_by_one

MODEL_NODE = "TorchCompileKitModel"
# The largest uint8 tensor that is read: a file describes a layer's format as JSON in a small uint8 tensor.
ABOUT_BYTES = 4096
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}


class PrebuildError(TorchCompileKitError):
    """Say what cannot be prebuilt, and what to do."""


def prebuild(
    workflow: Any,
    name: str,
    executor: Any,
    classes: dict[str, Any],
    mode: Any,
    attention: str,
    out: Path | None,
    tell: Callable,
) -> list[str]:
    """Compile what a workflow needs into the user's store.

    Args:
        name: of the workflow's file.
        executor: the host's PromptExecutor; `classes`: name -> class of the host's nodes.
        mode: the result of `fake_card.begin`.
        attention: the kernel that is taken for the fastest, wherever it can run; `comfyui` for the host's own choice.
        out: a cache file to write.
        tell: gets a line for each graph, and one at the end.

    Returns:
        What could not be compiled.

    Raises:
        PrebuildError: nothing could be compiled.
    """
    samplers = samplers_of(workflow, name, classes)
    _stand_in(mode, attention)
    lowering = traced_graph.LOWERERS["inductor"] = _Lowering(tell)
    with warming():
        executor.execute(workflow, "prebuild", {}, samplers)
    failures = lowering.failures
    for kind, error in executor.status_messages:
        if kind == "execution_error":
            failures.append(f"node {error['node_id']}, {error['node_type']}: {error['exception_message'].strip()}")
    store, structures, models = open_users_store(), set(), []
    if store is None:
        raise PrebuildError("there is no cache folder that can be written; see the log.")
    for network, code in live_models():
        groups = code.groups.values()
        failures += [f"{group.code.failure.reason} {group.code.failure.cure}" for group in groups if group.code.failure]
        if any(group.code.entries for group in groups):
            models.append(code.title or type(network).__name__)
            structures.add(name_of(network))
            store.remember(name_of(network), {structure_record.ASKED: structure_record.YES})
    if not lowering.names:
        raise PrebuildError("\n".join(["nothing was compiled.", *failures]))
    if lost := [name for name in lowering.names if not store.has(name)]:
        failures.append(
            f"{len(lost)} of {len(lowering.names)} graphs are not in {store.folder}: it is full, or its limit small."
        )
    if out is not None:
        write_cache_file(out, store, lowering.names, structures, pack_version(), models, [])
    versions = ", ".join(f"{key} {value}" for key, value in environment().items() if key != "device")
    device, place = environment()["device"], out or store.folder
    tell(f"{len(lowering.names)} graphs of {', '.join(models)} are in {place}, for {device} alone.")
    tell(f"Found there with {versions}; attention: {attention}, where it can run.")
    return failures


def samplers_of(workflow: Any, name: str, classes: dict[str, Any]) -> list[str]:
    """The first nodes after Torch Compile that make a latent.

    Raises:
        PrebuildError: `workflow` is no workflow, has no such node, or has a node that is not among the `classes`.
    """
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        raise PrebuildError(f"{name} is a workflow as the page saves it; export it with Workflow > Export (API).")
    if not isinstance(workflow, dict) or not all(isinstance(node, dict) and "class_type" in node for node in workflow.values()):
        raise PrebuildError(f"{name} is no workflow; export one with Workflow > Export (API).")
    after = {node for node, about in workflow.items() if about["class_type"] == MODEL_NODE}
    if not after:
        raise PrebuildError(f"{name} has no node Torch Compile; put one after the model that is to be compiled.")
    for about in workflow.values():
        if about["class_type"] not in classes:
            raise PrebuildError(
                f"{name} has a node {about['class_type']}, which this ComfyUI lacks; install the pack that brings it."
            )
    makers = {node for node, about in workflow.items() if "LATENT" in (classes[about["class_type"]].RETURN_TYPES or ())}
    links = {
        name: {str(value[0]) for value in node.get("inputs", {}).values() if isinstance(value, list) and len(value) == 2}
        for name, node in workflow.items()
    }
    while new := {node for node in workflow.keys() - after if (after - makers) & links[node]}:
        after |= new
    if not after & makers:
        raise PrebuildError(f"{name} has no sampler after Torch Compile; connect one.")
    return sorted(after & makers)


def _stand_in(mode: Any, attention: str) -> None:
    """Until the process ends, replace functions of ComfyUI and of this pack that read the card's memory or measure on it."""
    partial_load.KNOWN.add(type(fake_card.weight(mode, (), torch.float32)))
    comfy.utils.load_torch_file = functools.partial(_load, mode, comfy.utils.load_torch_file)
    comfy.samplers.KSAMPLER.sample = _sample
    comfy.model_management.NUM_STREAMS = 0
    attention_kernels._can_run = fake_card.can_run
    attention_kernels._measure = functools.partial(_seconds, attention)
    structure_record.call_later = lambda seconds, call: None  # the original would store this machine's seconds
    obtain._import = lambda: None  # the original imports what loading code needs


def _load(mode: Any, host: Callable, ckpt: str, *args: Any, **kwargs: Any) -> Any:
    """In place of `comfy.utils.load_torch_file`: of a safetensors file only the header, tensors of one number, and descriptions
    of formats (ABOUT_BYTES) are read."""
    if not str(ckpt).lower().endswith((".safetensors", ".sft")):
        return host(ckpt, *args, **kwargs)
    with open(ckpt, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header, tensors = json.loads(file.read(size)), {}
        about = header.pop("__metadata__", {})
        for name, entry in header.items():
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES[entry["dtype"]]
            is_number, content = math.prod(shape) == 1, None
            if is_number or (dtype is torch.uint8 and 0 < end - begin <= ABOUT_BYTES):
                file.seek(8 + size + begin)
                read = bytearray(file.read(end - begin).ljust(end - begin, b"\0"))  # the file may be its header alone
                content = torch.frombuffer(read, dtype=dtype).view(shape)
            is_text = content is not None and not is_number
            tensors[name] = content if is_text else fake_card.weight(mode, shape, dtype, content)
    return (tensors, about) if kwargs.get("return_metadata") else tensors


def _sample(self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, disable_pbar=False):
    """In place of `KSAMPLER.sample`: make only the calls that trace, with no step in between. The last call runs each prompt
    alone, as when memory is too short for several prompts at once."""
    model = comfy.samplers.KSamplerX0Inpaint(model_wrap, sigmas)
    model.latent_image, model.noise = latent_image, noise
    alone = comfy.model_patcher.create_model_options_clone(extra_args["model_options"])
    comfy.patcher_extension.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, one_by_one, alone, is_model_options=True)
    for options in (*[extra_args["model_options"]] * STEPS, alone):
        named = {**extra_args, "denoise_mask": denoise_mask, "model_options": options}
        model(noise, sigmas[0] * noise.new_ones(noise.shape[0]), **named)
    return noise


def _seconds(preferred: str, kernel: str, call: tuple) -> float:
    """In place of a measurement of attention: `preferred` counts as the fastest where it can run the call."""
    q, k, v, mask = (None if spec is None else spec.zeros() for spec in call[:4])
    return (0.5 if kernel == preferred else 1.0) if fake_card.can_run(kernel, q, k, v, mask) else float("inf")


class _Lowering:
    """In place of the function in `traced_graph.LOWERERS` that loads code onto the card."""

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self.names: dict[str, None] = {}  # of entries, in order
        self.failures: list[str] = []

    def __call__(self, request: obtain.Request, block: str, _patient: bool) -> tuple[Callable, Code]:
        graph, _inputs, _mode = wire.loads(json.loads(request.text)["graph"])
        began, number = time.perf_counter(), len(self.names) + 1
        try:
            if request.measures:
                raise PrebuildError("this mode measures kernels on the card; set mode to auto.")
            code = obtain.obtain(request, block, False)
        except Exception as error:
            self.failures.append(f"{block}: {error}")
            return graph.forward, Code(b"")
        self.names[str(code.name)] = None
        seconds = "was there" if code.was_kept else f"{time.perf_counter() - began:.1f} s"
        self._tell(f"{number}. {block}: {len(code.artefact) / 2**20:.1f} MiB, {seconds}, {str(code.name)[:12]}")
        return graph.forward, code
