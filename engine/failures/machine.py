"""What this machine has for compiling: system, GPU, PyTorch, Triton, Python; and which Triton goes with which PyTorch."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ..torch_compat import private

# PyTorch -> the Triton that its wheels ask for (their metadata on PyPI).
TRITON_FOR = {
    (2, 6): (3, 2), (2, 7): (3, 3), (2, 8): (3, 4), (2, 9): (3, 5), (2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7),
    (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9),
}  # fmt: skip
# The newest triton-windows on PyPI in November 2026.
NEWEST_ON_WINDOWS = (3, 8)
_PACKAGES = ("triton-windows", "triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu")
# Makers whose PyTorch brings a Triton of its own: the index of its wheels.
_INDEX = {"AMD": "rocm", "Intel": "xpu"}
PORTABLE = "python_embeded"


@dataclass(frozen=True)
class Machine:
    """What a cure depends on.

    Args:
        system: Windows, Linux or Darwin.
        gpu: the maker of the GPUs that this PyTorch is for: NVIDIA, AMD, Intel, Apple, or an empty text.
        pytorch, python: major and minor version.
        triton: the same of the installed Triton, if there is one.
        folder: of Python.
        missing: files of Python's that C compilers need and that are not there.
    """

    system: str
    gpu: str
    pytorch: tuple[int, int]
    python: tuple[int, int]
    triton: tuple[int, int] | None
    folder: str
    missing: tuple[str, ...] = ()

    @classmethod
    def this(cls) -> Machine:
        system, folder = platform.system(), Path(sys.base_prefix)
        needed = [Path(sysconfig.get_paths()["include"]) / "Python.h"]
        if system == "Windows":
            needed.append(folder / "libs" / f"python{sys.version_info.major}{sys.version_info.minor}.lib")
        missing = tuple(str(file) for file in needed if not file.exists())
        pytorch = _version(torch.__version__)
        return cls(system, _gpu(), pytorch, sys.version_info[:2], _installed_triton(), str(folder), missing)

    def pip(self, package: str) -> str:
        """The command that installs into this Python; the portable ComfyUI has one of its own."""
        python = rf"{PORTABLE}\python.exe" if PORTABLE in self.folder else "python"
        return f'{python} -m pip install -U "{package}"'

    def fitting_triton(self) -> str:
        """How to get the Triton that goes with this PyTorch."""
        if self.gpu in _INDEX and (self.system, self.gpu) != ("Windows", "AMD"):
            index = _INDEX[self.gpu]
            return (
                f"PyTorch for {self.gpu} GPUs brings its own (pytorch-triton-{index}, triton-{index} from 2.10 on): uninstall "
                f"triton and reinstall PyTorch from its {index} index (pytorch.org)."
            )
        name, wanted = "triton-windows" if self.system == "Windows" else "triton", TRITON_FOR.get(self.pytorch)
        if wanted is None:
            return f"install the {name} that goes with PyTorch {dotted(self.pytorch)}."
        cure = f"{self.pip(f'{name}=={dotted(wanted)}.*')}."
        if self.system == "Windows" and wanted > NEWEST_ON_WINDOWS:
            older = max(version for version, triton in TRITON_FOR.items() if triton <= NEWEST_ON_WINDOWS)
            cure += f" If there is none, use PyTorch {dotted(older)} and triton-windows {dotted(TRITON_FOR[older])}."
        return cure


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _gpu() -> str:
    if torch.version.hip is not None:
        return "AMD"
    if torch.version.cuda is not None:
        return "NVIDIA"
    if private.xpu_is_compiled():
        return "Intel"
    return "Apple" if torch.backends.mps.is_built() else ""


def _version(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"^(\d+)\.(\d+)", text)[0]
    return int(major), int(minor)


def _installed_triton() -> tuple[int, int] | None:
    for name in _PACKAGES:
        try:
            return _version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
