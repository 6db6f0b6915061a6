"""Whether this machine has what compiling needs, told before anything is compiled; each thing that lacks with its cure."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import torch

from ..torch_compat import private
from .machine import TRITON_FOR, Machine, dotted
from .toolchain import c_compiler, cpp_compiler, diagnose, misfit, no_code_for_gpu, no_triton, python_files

# The oldest NVIDIA GPUs that Triton has code for (torch/utils/_triton.py, `has_triton`).
OLDEST = (7, 0)
_C, _CPP = ("gcc", "clang", "cc"), ("g++", "clang++", "cl")


@dataclass(frozen=True)
class Gpu:
    """The GPU that models run on.

    Args:
        name: as its driver says it.
        capability: of an NVIDIA GPU, such as (9, 0).
        has_code: whether this PyTorch is made for it.
    """

    name: str
    capability: tuple[int, int] | None
    has_code: bool = True

    @classmethod
    def this(cls) -> Gpu | None:
        """The first; None where PyTorch sees none that Triton is for."""
        if torch.cuda.is_available():
            capability = None if torch.version.hip else torch.cuda.get_device_capability()
            return cls(torch.cuda.get_device_name(), capability, _has_code(capability))
        if torch.xpu.is_available():
            return cls(torch.xpu.get_device_name(), None)
        return None


def preflight(machine: Machine, gpu: Gpu | None, compilers: dict[str, str | None] | None = None) -> tuple[str, list[str]]:
    """What is here, in a line, and what is missing, each with its cure.

    Args:
        gpu: None: models run on the CPU, for which C++ is compiled.
        compilers: found C and C++ compilers by language; searched if left out.
    """
    found = compilers if compilers is not None else {"C": _found("CC", _C), "C++": _found("CXX", _CPP)}
    triton = f"Triton {dotted(machine.triton)}" if machine.triton else "no Triton"
    here = f"{machine.system}, {gpu.name if gpu else 'no GPU'}, PyTorch {dotted(machine.pytorch)}, {triton}, Python "
    here += f"{dotted(machine.python)}, C: {found['C'] or 'none'}, C++: {found['C++'] or 'none'}"
    missing = [python_files(machine)] if machine.missing else []
    lacking = private.unsupported()
    if lacking is not None:
        first, last = private.TESTED
        missing.append(f"this PyTorch has no {lacking}, so nothing is compiled: use PyTorch {first} to {last}.")
    if gpu is None:
        return here, missing + ([] if found["C++"] else [cpp_compiler(machine)])
    if gpu.capability is not None and gpu.capability < OLDEST:
        missing.append(
            f"{gpu.name} has compute capability {dotted(gpu.capability)}, and Triton needs {dotted(OLDEST)}: set backend to "
            "aot_eager or cudagraphs, which need no Triton."
        )
    if not gpu.has_code:
        missing.append(no_code_for_gpu(machine))
    if machine.triton is None:
        missing.append(no_triton(machine))
    elif machine.pytorch in TRITON_FOR and machine.triton != TRITON_FOR[machine.pytorch] and machine.gpu == "NVIDIA":
        missing.append(misfit(machine))
    if not found["C"] and machine.system != "Windows":  # Triton for Windows brings one
        missing.append(c_compiler(machine))
    return here, missing


def preflight_here(on_gpu: bool = True) -> tuple[str, list[str]]:
    """`preflight` of this machine; where Triton is there and does not load, why.

    Args:
        on_gpu: models run on the GPU, if there is one.
    """
    machine, gpu = Machine.this(), Gpu.this() if on_gpu else None
    here, missing = preflight(machine, gpu)
    if gpu is not None and machine.triton is not None:
        try:
            import triton.compiler  # noqa: F401
        except Exception as error:  # a broken DLL raises whatever it likes
            known = diagnose([error], machine)
            missing.append(known[2] if known else f"Triton does not load: {type(error).__name__}: {error}")
    return here, list(dict.fromkeys(missing))


def _has_code(capability: tuple[int, int] | None) -> bool:
    """Whether PyTorch's own kernels are for this GPU: those of the same major version, or PTX of an older one."""
    known = torch.cuda.get_arch_list()
    if capability is None:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0] in known
    kinds = [(kind, (int(number[:-1]), int(number[-1]))) for kind, _, number in (n.rstrip("af").partition("_") for n in known)]
    same = any(kind == "sm" and of[0] == capability[0] and of[1] <= capability[1] for kind, of in kinds)
    return same or any(kind == "compute" and of <= capability for kind, of in kinds)


def _found(variable: str, names: tuple[str, ...]) -> str | None:
    chosen = os.environ.get(variable)
    return next((name for name in (chosen.split()[:1] if chosen else names) if shutil.which(name)), None)
