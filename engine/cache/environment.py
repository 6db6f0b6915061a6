"""Collect what compiled code depends on besides its graph (versions, device), and read the user's variables for the store."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ..errors import shown
from ..log import logger
from ..torch_compat import private

# Code of this pack that determines the code of a graph.
SOURCES = ("inductor/*.py", "compile_process/*.py", "torch_compat/*.py", "torch_settings.py")
KIT = "torch-compile-kit"
FOLDER, LIMIT = "TORCH_COMPILE_KIT_CACHE", "TORCH_COMPILE_KIT_CACHE_GIB"
DEFAULT_GIB = 2.0
CPU_INFO = Path("/proc/cpuinfo")  # Linux


def limit_in_bytes(setting: object = None) -> int:
    """The size limit: TORCH_COMPILE_KIT_CACHE_GIB, else the user's setting in GiB, else 2 GiB."""
    variable = os.environ.get(LIMIT)
    name, limit = (LIMIT, variable) if variable else ("the setting", setting)
    gib: Any = DEFAULT_GIB if limit is None or limit == "" else limit
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if float(gib) >= 0:
            return int(float(gib) * 1024**3)  # `int` raises for nan and for inf, which 1e300 GiB are in bytes
    logger.warning("%s = %s: not a number of GiB; %g is used", name, shown(limit), DEFAULT_GIB)
    return int(DEFAULT_GIB * 1024**3)


def users_folder() -> Path | None:
    """The pack's folder in TORCH_COMPILE_KIT_CACHE, else in TORCHINDUCTOR_CACHE_DIR, unless PyTorch itself set that to its
    default. A subfolder with the pack's name, as the folder that the variable names can hold other files."""
    if folder := os.environ.get(FOLDER):
        place = Path(os.path.expanduser(folder)).absolute()  # no shell expands a container's variables
        return place if place.name == KIT else place / KIT
    value, default = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), ""
    with contextlib.suppress(KeyError, OSError):  # the default contains the user's name, which a container may lack
        default = private.default_cache_dir()
    return Path(value).absolute() / KIT if value and Path(value) != Path(default) else None


class _Host:
    device: str | None = None  # the type of the torch.device that the host computes on


def compile_for(device: str) -> None:
    """Set the type of device that the host computes on, part of `environment`: with --cpu not the GPU that PyTorch sees."""
    if device != _Host.device:
        _Host.device = device
        environment.cache_clear()


def variables() -> dict[str, str]:
    """A copy of `os.environ`, whose methods raise KeyError if another thread (`folder_scope`) removes a variable meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


@functools.cache
def environment() -> dict[str, str]:
    """What compiled code depends on beside the model: if any of these values differs, so does the code's name."""
    return {**versions(), "device": _device_name()}


def versions() -> dict[str, str]:
    """The versions of all software that compiled code depends on."""
    try:
        import triton

        triton_version = triton.__version__ if TRITON_WINDOWS == "none" else TRITON_WINDOWS
    except ImportError:
        triton_version = "none"
    return {
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        "python": ".".join(map(str, sys.version_info[:2])),
        "platform": f"{sys.platform} {platform.machine()}",
        **LOADED,
    }


def version_of_pack() -> str:
    engine = Path(__file__).parent.parent
    files = sorted(file for pattern in SOURCES for file in engine.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _device_name() -> str:
    device = _Host.device or ("cuda" if torch.cuda.is_available() else "cpu")
    named = getattr(getattr(torch, device, None), "get_device_name", None)  # torch.cuda, torch.xpu
    return named() if named is not None else f"CPU {torch.backends.cpu.get_cpu_capability()} {cpu_digest()}"


def cpu_digest() -> str:
    """A digest of this CPU's flags: inductor compiles with -march=native, and CPUs of one vector width differ in flags."""
    try:
        match = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        match = None
    can = " ".join(sorted(match[1].split())) if match else platform.processor()
    return hashlib.sha256(can.encode()).hexdigest()[:12]


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# In triton-windows `triton.__version__` is that of the upstream Triton, also after fixes to triton-windows.
TRITON_WINDOWS = _version_of("triton-windows")
# Read at import, as an update changes only files: versions of the code that this process has loaded.
LOADED = {
    "comfy-kitchen": _version_of("comfy-kitchen"),
    "code of the pack": version_of_pack(),
}
