"""The settings of PyTorch on which compiled code depends: read where a graph is traced, applied where it is lowered."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from ..cache.environment import variables
from ..inductor import rotary_norms
from ..inductor.kitchen import products_as_operators
from ..torch_compat import private
from ..torch_settings import libdevice, libdevice_scope, lowering_settings

_until_the_end = ExitStack()


def now(device: torch.device) -> dict[str, Any]:
    """The settings in force on this thread, as JSON, for a graph on `device`."""
    kind = device.type
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None,
        "device": kind,
        "card": _card(device) if kind == "cuda" else None,
        "threads": torch.get_num_threads() if kind == "cpu" else None,
        "precision": _precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: value for name, value in sorted(variables().items()) if _is_setting(name)},
    }


def _card(device: torch.device) -> list:
    """What distinguishes cards that need different code: AMD's have one name for several architectures."""
    architecture = [torch.cuda.get_device_properties(device).gcnArchName] if torch.version.hip else []
    return [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *architecture]


def _is_setting(variable: str) -> bool:
    """Whether a variable is a setting of inductor or Triton on which code depends: no path, and nothing about workers."""
    is_theirs = variable.startswith(("TORCHINDUCTOR_", "TRITON_"))
    return is_theirs and variable.rpartition("_")[2] not in ("DIR", "HOME", "PATH", "THREADS", "START")


def _precision() -> str:
    """The precision of fp32 products. Unset counts as "ieee", to which PyTorch's older switches go back."""
    named = (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)
    return next((precision for precision in named if precision != "none"), "ieee")


def set_for_process(settings: dict[str, Any]) -> None:
    """In the compile process: apply the settings of a graph that hold for all threads."""
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    torch.backends.cuda.matmul.fp32_precision = settings["precision"]
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=True)


@contextmanager
def for_graph(settings: dict[str, Any]) -> Iterator[None]:
    """Lower a graph on this thread under the settings of `now`."""
    with ExitStack() as scopes:
        scopes.enter_context(torch.inference_mode(settings["inference"]))
        scopes.enter_context(torch.set_grad_enabled(settings["grad"]))
        dtype = getattr(torch, settings["autocast"]) if settings["autocast"] is not None else None
        scopes.enter_context(torch.autocast(settings["device"], dtype, enabled=dtype is not None))  # a graph may leave it on
        yield


@contextmanager
def scope() -> Iterator[None]:
    """A context with the settings for lowering: for good in the compile process, in ComfyUI's while it lowers inline."""
    rotary_norms.register()
    with (
        lowering_settings.applied(force_non_lazy_backward_lowering=True),  # lower a trainer's backward with the forward
        libdevice_scope.applied(**libdevice()),
        products_as_operators(),
    ):
        yield


def prepare_process() -> None:
    """In the compile process: apply the settings that hold until the process ends."""
    _until_the_end.enter_context(scope())
    private.shape_config.use_duck_shape = False
    private.functorch_config.bundled_autograd_cache = True
    private.functorch_config.strict_autograd_cache = True


def cacheable_functions(graph: fx.GraphModule) -> dict[str, str]:
    """For inductor's setting `unsafe_marked_cacheable_functions`, without which inductor serialises no graph with a function
    unknown to inductor, as other code may get the same name. Here a request has a digest of each function's file (wire.py)."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    functions = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    names = [f"{f.__module__}.{f.__name__}" for f in functions if hasattr(f, "__module__") and hasattr(f, "__name__")]
    return dict.fromkeys(names, "1")
