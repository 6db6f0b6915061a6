"""Collect what this machine has for compiling, and tell what it lacks before anything is compiled."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from ..torch_compat import private
from . import table

_PACKAGES = ("triton-windows", "triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu")
# The oldest NVIDIA GPUs that Triton has code for (torch/utils/_triton.py, `has_triton`).
OLDEST = (7, 0)


@dataclass(frozen=True)
class Machine:
    """What a cure depends on."""

    system: str  # Windows, Linux, Darwin
    gpu: str  # the maker of the GPUs that this PyTorch is for: NVIDIA, AMD, Intel, Apple, or empty
    pytorch: tuple[int, int]
    python: tuple[int, int]
    triton: tuple[int, int] | None
    folder: str  # of Python
    missing: tuple[str, ...] = ()  # files of Python that C compilers need
    cache: str = ""  # PyTorch's folder for compiled code, now

    @classmethod
    def this(cls) -> Machine:
        folder, python = Path(sys.base_prefix), sys.version_info[:2]
        makers = {"AMD": torch.version.hip, "NVIDIA": torch.version.cuda, "Intel": private.xpu_is_compiled()}
        makers["Apple"] = torch.backends.mps.is_built()
        gpu = next((maker for maker, is_built_for in makers.items() if is_built_for), "")
        packages = (package for name in _PACKAGES for package in importlib.metadata.distributions(name=name))
        tritons = filter(None, map(_version_of, packages))
        needed = [Path(sysconfig.get_paths()["include"]) / "Python.h"]
        if platform.system() == "Windows":
            needed.append(folder / "libs" / f"python{python[0]}{python[1]}.lib")
        missing = tuple(str(file) for file in needed if not file.exists())
        pytorch, cache = _version(torch.__version__), private.cache_dir()
        return cls(platform.system(), gpu, pytorch, python, next(tritons, None), str(folder), missing, cache)

    @property
    def traits(self) -> set[str]:
        """The words in keys of cures that are true of this machine; "2.13" means PyTorch 2.13 or newer."""
        wanted = table.TRITON_FOR.get(self.pytorch)
        flags = {"unknown": wanted is None, "misfit": wanted not in (None, self.triton)}
        flags["spaced"] = not self.missing and re.search(r"[\s'\"]", self.folder + self.cache) is not None
        flags |= {"no-triton": self.triton is None, "no-headers": bool(self.missing)}
        versions = (_dotted(version) for version in table.TRITON_FOR if version <= self.pytorch)
        return {self.system, self.gpu, *versions, *(flag for flag, holds in flags.items() if holds)}

    def cure(self, cure: table.Cure) -> str:
        """The text of a cure for this machine; table.py says how cures are written."""
        names = {name: _dotted(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        names["wanted"] = _dotted(table.TRITON_FOR.get(self.pytorch, ()))
        names["index"] = "rocm" if self.gpu == "AMD" else "xpu"
        names["package"] = "triton-windows" if self.system == "Windows" else "triton"
        # The portable ComfyUI brings its own Python.
        names["executable"] = r"python_embeded\python.exe" if "python_embeded" in self.folder else "python"
        names["install"] = self._choose(table.INSTALL_TRITON).format(**names)
        return cure if isinstance(cure, str) else self._choose(cure).format(**names)

    def _choose(self, texts: dict[str, str]) -> str:
        return next(text for key, text in texts.items() if self.traits.issuperset(key.split()))


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int] | None  # of an NVIDIA GPU, such as (9, 0)
    has_code: bool = True  # whether this PyTorch is built for the GPU
    driver: str = ""  # its version

    @classmethod
    def this(cls) -> Gpu | None:
        """The first GPU that PyTorch sees, if it is of a kind that Triton compiles for."""
        if torch.cuda.is_available():
            capability = None if torch.version.hip else torch.cuda.get_device_capability()
            return cls(torch.cuda.get_device_name(), capability, _has_code(capability), _driver())
        return cls(torch.xpu.get_device_name(), None) if torch.xpu.is_available() else None


def preflight(machine: Machine, gpu: Gpu | None, compilers: dict[str, str | None] | None = None) -> tuple[str, list[str]]:
    """What this machine has, in a line, and cures for what it lacks. Without a GPU, models run on the CPU and need C++."""
    if compilers is None:
        compilers = {"C": _on_path("CC", "gcc", "clang", "cc"), "C++": _on_path("CXX", "g++", "clang++", "cl")}
    triton = f"Triton {_dotted(machine.triton)}" if machine.triton else "no Triton"
    name, pytorch, versions = private.unsupported(), _dotted(machine.pytorch), f"{private.TESTED[0]} to {private.TESTED[-1]}"
    tested = "tested" if pytorch in private.TESTED else f"not tested with this pack, which is tested with {versions}"
    driver = f" (driver {gpu.driver})" if gpu is not None and gpu.driver else ""
    has = f"{machine.system}, {gpu.name if gpu else 'no GPU'}{driver}, PyTorch {pytorch} ({tested}), {triton}, Python "
    has += f"{_dotted(machine.python)}, C: {compilers['C'] or 'none'}, C++: {compilers['C++'] or 'none'}"
    switch = private.switched_off()
    lacks: list[tuple[object, table.Cure]] = [
        (switch, f"{switch} switches PyTorch's compiler off: nothing is compiled. Remove it, and restart ComfyUI."),
        (machine.missing, table.PYTHON_FILES),
        (name, f"this PyTorch has no {name}, so nothing is compiled: use PyTorch {versions}."),
        (gpu is None and not compilers["C++"], table.CPP_COMPILER),
    ]
    if gpu is not None:
        capability, is_misfit = gpu.capability or OLDEST, machine.gpu == "NVIDIA" and "misfit" in machine.traits
        too_old = f"{gpu.name} has compute capability {_dotted(capability)}, and Triton needs {_dotted(OLDEST)}"
        lacks += [
            (capability < OLDEST, f"{too_old}: set backend to aot_eager or cudagraphs, which need no Triton."),
            (not gpu.has_code, table.NO_CODE_FOR_GPU),
            (machine.triton is None or is_misfit, table.NO_TRITON),
            # Triton for Windows brings a C compiler.
            (not compilers["C"] and machine.system != "Windows", table.C_COMPILER),
        ]
    return has, [machine.cure(cure) for is_lacking, cure in lacks if is_lacking]


def preflight_here(on_gpu: bool = True) -> tuple[str, list[str]]:
    """`preflight` of this machine, and cures if Triton does not load or there is no GPU; `on_gpu`: models run on the GPU."""
    machine, gpu = Machine.this(), Gpu.this() if on_gpu else None
    has, lacks = preflight(machine, gpu)
    if gpu is not None and machine.triton is not None:
        try:
            import triton.compiler  # noqa: F401
        except Exception as error:  # importing a broken DLL can raise any exception
            _, _, cure = table.diagnose([error]) or (error, "", f"Triton does not load: {table.text_of(error)}")
            lacks.append(machine.cure(cure))
    if Gpu.this() is None and not torch.backends.mps.is_available():
        lacks.append(table.NO_GPU)
    return has, list(dict.fromkeys(lacks))


def _driver() -> str:
    """The version of NVIDIA's driver, or an empty string. PyTorch knows only the version of CUDA."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip().partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def _dotted(version: tuple[object, ...]) -> str:
    return ".".join(map(str, version))


def _version(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"^(\d+)\.(\d+)", text)[0]
    return int(major), int(minor)


def _version_of(package: importlib.metadata.Distribution) -> tuple[int, int] | None:
    """None for the remains of an uninstalled package: a folder without METADATA, or whose METADATA has no version."""
    try:
        return _version(package.version)
    except (TypeError, KeyError, IndexError):
        return None


def _has_code(capability: tuple[int, int] | None) -> bool:
    """Whether PyTorch brings kernels for this GPU: of the same major version, or PTX of an older one."""
    targets = torch.cuda.get_arch_list()
    if capability is None:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0] in targets
    versions = [(kind, (int(x), int(y))) for kind, x, y in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(targets))]
    return any(v <= capability and (kind == "compute" or v[0] == capability[0]) for kind, v in versions)


def _on_path(variable: str, *names: str) -> str | None:
    choice = os.environ.get(variable)
    return next((name for name in (choice.split()[:1] if choice else names) if shutil.which(name)), None)
