"""Errors of the tools that compiling needs (Triton, C compilers, drivers), and what to do about each on this machine.

They are known by their text: one class (CalledProcessError, ImportError) stands for many causes, and PyTorch's wrapping keeps
the text. tests/engine/failures/test_toolchain.py has the texts as people have met them, with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .machine import PORTABLE, TRITON_FOR, Machine, dotted


def _no_fp8(machine: Machine) -> str:
    other = "use a bf16, fp16 or GGUF version of the model"
    if machine.gpu != "NVIDIA":
        return f"Triton has no such fp8 numbers for this GPU: {other}."
    if machine.pytorch >= (2, 13):
        return f"Triton has no such fp8 numbers for GPUs older than RTX 40, A100 among them: {other}."
    on_windows = " (with triton-windows 3.5, 2.9 is enough)" if machine.system == "Windows" else ""
    return f"On RTX 30 and A100 update PyTorch to 2.13 or newer{on_windows}, or {other}."


def python_files(machine: Machine) -> str:
    version = dotted(machine.python)
    if machine.system == "Windows":
        return (
            "Python's folders include and libs are missing, as in the portable ComfyUI: copy both from an installed Python "
            f"{version} to {machine.folder or PORTABLE} (libs, not Lib)."
        )
    return f"Install Python's headers (Debian, Ubuntu: sudo apt install python{version}-dev; Fedora: python3-devel)."


def _bundled_compiler(machine: Machine) -> str:
    if machine.missing:
        return python_files(machine)
    return (
        f"The log has what tcc.exe said. Python's folders include and libs must be those of Python {dotted(machine.python)}; "
        f"keep the antivirus off {machine.folder} and Temp; reinstall Triton: {machine.fitting_triton()}"
    )


def _linux_compiler(machine: Machine) -> str:
    return python_files(machine) if machine.missing else "The C compiler failed; the log has what it said."


def _stale_launcher(machine: Machine) -> str:
    files = f" {python_files(machine)}" if machine.missing else ""
    return f"Delete the folder .triton in your user folder: it was made with another Python or Triton.{files}"


def c_compiler(machine: Machine) -> str:
    if machine.system == "Windows":
        return f"triton-windows brings one since 3.2: {machine.fitting_triton()}"
    return "Install one (Debian, Ubuntu: sudo apt install build-essential; Fedora: gcc)."


def cpp_compiler(machine: Machine) -> str:
    if machine.system == "Windows":
        return (
            "Install the Visual Studio Build Tools with the C++ workload; if cl is still not found, start ComfyUI from their "
            "x64 Native Tools Command Prompt."
        )
    on_linux = "Debian, Ubuntu: sudo apt install g++; Fedora: gcc-c++"
    return f"Install a C++ compiler ({'xcode-select --install' if machine.system == 'Darwin' else on_linux})."


def misfit(machine: Machine) -> str:
    wanted = TRITON_FOR.get(machine.pytorch)
    if wanted is None or machine.triton == wanted:
        return f"Reinstall Triton: {machine.fitting_triton()}"
    here = f", not with {dotted(machine.triton)}" if machine.triton else ""
    return f"PyTorch {dotted(machine.pytorch)} goes with Triton {dotted(wanted)}{here}: {machine.fitting_triton()}"


def no_triton(machine: Machine) -> str:
    return misfit(machine) if machine.triton else f"Install Triton: {machine.fitting_triton()}"


def _no_driver(machine: Machine) -> str:
    return f"This Triton has no driver for this GPU; is it one for another maker's? {misfit(machine)}"


def no_code_for_gpu(machine: Machine) -> str:
    if machine.gpu != "AMD":
        return "This PyTorch is not made for your GPU: install the newest from pytorch.org, with the Triton that it brings."
    return (
        "This PyTorch is not made for your GPU: install one for its architecture (AMD sorts ROCm wheels by gfx number). On "
        "Linux a card may run as a relative: start ComfyUI with HSA_OVERRIDE_GFX_VERSION=10.3.0 (RX 6000) or 11.0.0 (RX 7000)."
    )


def _xpu(machine: Machine) -> str:
    headers = "" if machine.system == "Windows" else ", install level-zero's headers (Debian, Ubuntu: libze-dev)"
    return f"Update the Intel GPU driver{headers}. {machine.fitting_triton()}"


_OLD_TRITON = (
    "This Triton does not know your GPU: update PyTorch and the Triton that goes with it; or let the variable "
    "TRITON_PTXAS_PATH name the ptxas of a newer CUDA."
)
_RUNTIME = (
    "Install the newest Visual C++ Redistributable (aka.ms/vs/17/release/vc_redist.x64.exe), then copy msvcp140.dll, "
    r"vcruntime140.dll and vcruntime140_1.dll from C:\Windows\System32 to the folder of python.exe."
)
_ROCM_LINKER = (
    "Let the variable TRITON_HIP_LLD_PATH name ROCm's ld.lld (AMD's Python wheels: llvm/bin/ld.lld in the folder that rocm-sdk "
    "path --root prints), or update PyTorch and its Triton."
)
_METAL = "PyTorch's compiler for Apple GPUs is a prototype: update PyTorch, or set backend to aot_eager or none."
_LONG_PATH = (
    r"Windows allows no longer paths: set LongPathsEnabled (registry: HKLM\SYSTEM\CurrentControlSet\Control\FileSystem) to 1 "
    "and restart, or give ComfyUI a shorter --user-directory."
)
# One of inductor's templates holds a character that is not in every encoding (pytorch#189342).
_UTF8 = "PyTorch reads its own files in the encoding of this system: set the variable PYTHONUTF8=1 before ComfyUI starts."
_LANGUAGE = "The C++ compiler must speak English: add that language pack in the Visual Studio Installer."


@dataclass(frozen=True)
class Trouble:
    """An error that people meet.

    Args:
        name: what of its text the README names it by.
        pattern: of its text, which has the name of the class before it.
        cure: what to do; where that depends on the machine, a function of it.
    """

    name: str
    pattern: str
    cure: str | Callable[[Machine], str]


_FILE = r"(Python\.h|pyconfig\.h|python3\d*\.lib)"
# The most specific first.
TROUBLES = (
    Trouble("fp8e4nv", r"fp8e4nv [^\n]*not supported", _no_fp8),
    Trouble("Python.h", rf"{_FILE}\W{{1,4}}(No such file|(file )?not found)|LNK1104[^\n]*{_FILE}", python_files),
    Trouble("ze_api.h", r"level_zero/ze_api\.h|sycl/sycl\.hpp|sycl headers not found|spirv_utils|\[ZE\]|ZE_RESULT_ERROR", _xpu),
    Trouble("tcc.exe", r"\btcc\.exe'", _bundled_compiler),
    Trouble("ptxas", r"ptxas\S*\s+fatal\s*: Value 'sm_\w+'|ptxas'[^\n]*--gpu-name=sm_\w+", _OLD_TRITON),
    Trouble("libtriton", r"DLL load failed while importing libtriton", _RUNTIME),
    Trouble("cuda_utils", r"DLL load failed while importing (cuda_utils|hip_utils|__triton_launcher)", _stale_launcher),
    Trouble("triton_key", r"cannot import name '\w+' from 'triton\b|No module named 'triton\.", misfit),
    Trouble("CompiledKernel", r"(KernelMetadata|CompiledKernel)'? (object )?(has no|does not has)", misfit),
    Trouble("active drivers", r"\b0 active drivers", _no_driver),
    Trouble("TritonMissing", r"TritonMissing|Cannot find a working triton|No module named 'triton'", no_triton),
    Trouble("Failed to find C compiler", r"Failed to find C compiler", c_compiler),
    Trouble("cl is not found", r"Compiler: .+ is not found|InvalidCxxCompiler:", cpp_compiler),
    Trouble("HIP error", r"hipErrorNoBinaryForGpu|HIP error: invalid device function|no kernel image is", no_code_for_gpu),
    Trouble("TRITON_HIP_LLD_PATH", r"TRITON_HIP_LLD_PATH", _ROCM_LINKER),
    Trouble("metal", r"failed to compile\s+#include <c10/metal", _METAL),
    Trouble("No such file or directory", r"No such file or directory: '[A-Za-z]:[^'\n]{200,}'|WinError 206", _LONG_PATH),
    Trouble("UnicodeDecodeError", r"UnicodeDecodeError: 'utf-8' codec can't decode", _LANGUAGE),
    Trouble("codec can't decode", r"UnicodeDecodeError: '[\w-]+' codec can't decode", _UTF8),
    Trouble("CalledProcessError", r"CalledProcessError: [^\n]*\.c(pp)?'", _linux_compiler),
)


def diagnose(errors: Iterable[BaseException], machine: Machine | None = None) -> tuple[BaseException, str, str] | None:
    """The known trouble that an error is about.

    Args:
        errors: it and all that it was raised from, outermost first.
        machine: what cures are for; this one if left out.

    Returns:
        The innermost error that says it, the line that does, and the cure; None if it is none of these.
    """
    texts = [(error, f"{type(error).__name__}: {error}") for error in errors]
    for trouble in TROUBLES:
        for error, text in reversed(texts):
            found = re.search(trouble.pattern, text)
            if found is not None:
                line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
                cure = trouble.cure if isinstance(trouble.cure, str) else trouble.cure(machine or Machine.this())
                return error, line, cure
    return None
