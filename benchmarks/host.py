"""Make this process a ComfyUI without a server; apply a variant to a model, sample, and time the steps.

Variants run their own code: core's node from the host, KJNodes' from a file named by `--kjnodes` (its
nodes/model_optimization_nodes.py).
"""

import ast
import contextlib
import logging
import os
import statistics
import sys
import time
import traceback
import types
from importlib import import_module
from pathlib import Path

from devtools.server import host_arguments

ROOT = Path(__file__).resolve().parent.parent
KIT = "torch_compile_kit"
GIB = 1024**3
SEED = 42
VARIANTS = ("eager", "core", "kjnodes", "ours")


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


def kit(module: str):
    """A module of our engine: kit("settings")."""
    return import_module(f"{KIT}.engine.{module}")


def apply(variant: str, patcher, kjnodes: str | None = None, **settings):
    """A patcher that runs as `variant` does.

    Args:
        kjnodes: path of KJNodes' file, for `kjnodes`.
        settings: inputs of Torch Compile, for `ours`.
    """
    if variant == "eager":
        return patcher.clone()
    if variant == "core":
        return _core(patcher)
    if variant == "kjnodes":
        return _kjnodes(patcher, kjnodes)
    return kit("host.model.attach").attach(patcher, kit("settings").CompileSettings(**settings))


def _core(patcher):
    """What comfy_extras/nodes_torch_compile.py does."""
    from comfy_api.torch_helpers.torch_compile import set_torch_compile_wrapper

    def without_options(entries):
        return ["transformer_options" not in entry.name for entry in entries]

    clone = patcher.clone(disable_dynamic=True) if patcher.is_dynamic() else patcher.clone()
    set_torch_compile_wrapper(clone, backend="inductor", options={"guard_filter_fn": without_options})
    return clone


def _kjnodes(patcher, file: str):
    """TorchCompileModelAdvanced with its defaults."""
    wanted = {
        "patch_aimdo_for_compile", "skip_torch_compile_dict", "build_compile_kwargs", "_kj_apply_torch_compile_wrapper",
        "kj_set_torch_compile_wrapper", "TorchCompileModelAdvanced",
    }  # fmt: skip
    node = _of_kjnodes(file, wanted)["TorchCompileModelAdvanced"]()
    (model,) = node.patch(patcher, "inductor", False, "default", "false", 64, True, False)
    return model


def kjnodes_vae(vae, file: str):
    """TorchCompileVAE with its defaults, but for the encoder, which stays as it is."""
    (vae,) = _of_kjnodes(file, {"TorchCompileVAE"})["TorchCompileVAE"]().compile(vae, "inductor", "default", False, False, True)
    return vae


def _of_kjnodes(file: str, wanted: set[str]) -> dict:
    """Only these definitions of the file are run, the rest needs other packs."""
    tree = ast.parse(Path(file).read_text())
    body = []
    for node in tree.body:
        named = getattr(node, "name", None) in wanted
        assigned = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in (
            "_aimdo_patched", "_KJ_COMPILE_KEY", "_KJ_COMPILED_BY_MODEL"
        )  # fmt: skip
        imported = isinstance(node, ast.Import) and any(a.asname == "_kj_weakref" for a in node.names)
        if named or assigned or imported:
            body.append(node)
    import comfy.ops
    import comfy.patcher_extension
    import comfy.utils
    import torch

    space = {"torch": torch, "comfy": comfy, "logging": logging}
    exec(compile(ast.Module(body, []), file, "exec"), space)  # noqa: S102  the peer's own code
    return space


def device():
    """Where models run: the GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Seconds, when the GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def sample(patcher, name: str, steps: int, size=None, conditioning=None, after_step=None):
    """Sample as KSampler does.

    Args:
        conditioning: (positive, negative), the model's own if there is none.
        after_step: called at the end of each step.

    Returns:
        The latent, and the seconds of each step; the first holds what ran before it (loading, compiling).
    """
    import comfy.model_management
    import comfy.sample
    import torch

    from . import models

    positive, negative = conditioning or models.conditioning(name)
    latent = models.latent(name, size)
    times = []

    def step_done(*_):
        times.append(now())
        if after_step is not None:
            after_step()

    began = now()
    with torch.inference_mode():
        result = comfy.sample.sample(
            patcher,
            comfy.sample.prepare_noise(latent, SEED),
            steps,
            models.MODELS[name].cfg,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            callback=step_done,
            disable_pbar=True,
            seed=SEED,
        )
    steps_taken = [after - before for before, after in zip([began, *times], times, strict=False)]
    return result, steps_taken


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def counts() -> dict:
    """FX graphs and graph breaks of this process, as PyTorch counts them."""
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": sum(counters["graph_break"].values())}


@contextlib.contextmanager
def noted(row: dict):
    """Add to the row what happens meanwhile: FX graphs, graph breaks, peak GiB, or how it died, which is a result too."""
    import torch

    before, on_gpu = counts(), torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        yield row
    except Exception as error:
        traceback.print_exc()
        row["died"] = f"{type(error).__name__}: {error}"[:300]
    row |= {key: row.get(key, 0) + count - before[key] for key, count in counts().items()}
    if on_gpu:
        row["peak_gib"] = max(row.get("peak_gib", 0.0), round(torch.cuda.max_memory_allocated() / GIB, 2))


def relative_error(actual, expected) -> float:
    """Of four significant digits."""
    return float(f"{((actual.float() - expected.float()).norm() / expected.float().norm()).item():.4g}")
