"""Bring the host up in this process, sample, and time the steps."""

import logging
import os
import statistics
import sys
import time
import types
from pathlib import Path

from devtools.server import host_arguments

ROOT = Path(__file__).resolve().parent.parent
KIT = "torch_compile_kit"


def enter(host: str, dynamic_vram: bool = False):
    """Make this process a ComfyUI process without a server, on the CPU where there is no GPU; returns torch."""
    sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != ROOT]
    sys.path.insert(0, str(Path(host).resolve()))
    import comfy.options
    import torch

    comfy.options.enable_args_parsing()
    # Asking for a GPU wakes CUDA, which dynamic VRAM must come before.
    sys.argv = ["main.py", *host_arguments(dynamic_vram or torch.cuda.is_available())]
    if dynamic_vram:  # as main.py does before torch is used
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    import comfy.model_management
    import comfy.sample

    if dynamic_vram:
        import comfy.memory_management
        import comfy.model_patcher

        devices = [d.index for d in comfy.model_management.get_all_torch_devices()]
        try:
            ready = comfy_aimdo.control.init_devices((d, 0) for d in devices)
        except TypeError:
            ready = comfy_aimdo.control.init_devices(devices)
        comfy_aimdo.control.set_log_info()
        if not ready:
            raise SystemExit("dynamic VRAM cannot be started here")
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    _load_kit()
    logger = logging.getLogger("torch-compile-kit")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return torch


def _load_kit() -> None:
    """Our engine without the nodes: those need ComfyUI's server modules."""
    package = types.ModuleType(KIT)
    package.__path__ = [str(ROOT)]
    sys.modules[KIT] = package


def sample(patcher, name: str, steps: int, seed: int = 42, size=None, cfg=None, tokens=None, after_step=None):
    """Sample as KSampler does; `after_step` is called at the end of each step.

    Returns:
        The latent, and the seconds of each step; the first holds what ran before it (loading, compiling).
    """
    import comfy.model_management
    import comfy.sample
    import torch

    from . import models

    model = models.MODELS[name]
    positive, negative = models.conditioning(name, tokens)
    latent = models.latent(name, size)
    times = []

    def now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def step_done(*_):
        times.append(now())
        if after_step is not None:
            after_step()

    began = now()
    with torch.inference_mode():
        result = comfy.sample.sample(
            patcher,
            comfy.sample.prepare_noise(latent, seed),
            steps,
            model.cfg if cfg is None else cfg,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            callback=step_done,
            disable_pbar=True,
            seed=seed,
        )
    steps_taken = [after - before for before, after in zip([began, *times], times, strict=False)]
    return result, steps_taken


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def counts() -> dict:
    """Graphs and breaks of this process, as PyTorch counts them."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": sum(counters["graph_break"].values())}


def relative_error(actual, expected) -> float:
    """Of four significant digits."""
    return float(f"{((actual.float() - expected.float()).norm() / expected.float().norm()).item():.4g}")
