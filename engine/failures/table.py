"""List the errors that users meet while compiling, what to do about each, and which Triton goes with which PyTorch.

Errors are matched by their text: one class (CalledProcessError, ImportError) stands for many causes, and PyTorch's wrapping
keeps the text. tests/engine/failures/test_toolchain.py has the texts as users reported them, with their sources.

A cure is a text, or several texts by key. `Machine.cure` takes the first text whose key ("NVIDIA 2.13") has only words that are
among `Machine.traits`, and fills in its {names}.
"""

import re
from collections.abc import Iterable

Cure = str | dict[str, str]

# PyTorch -> the Triton that its wheels ask for (their metadata on PyPI).
TRITON_FOR = {
    (2, 6): (3, 2), (2, 7): (3, 3), (2, 8): (3, 4), (2, 9): (3, 5), (2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7),
    (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9),
}  # fmt: skip

_BUNDLED = (
    "PyTorch for {gpu} GPUs brings its own (pytorch-triton-{index}, triton-{index} from 2.10 on): uninstall triton and "
    "reinstall PyTorch from its {index} index (pytorch.org)."
)
# Nothing after the command: a full stop would be copied with it, and pip refuses the version.
_PIP = '{executable} -m pip install -U "{package}=={wanted}.*"'
# `{install}` in the cures below. In November 2026 the newest triton-windows on PyPI was 3.8.
INSTALL_TRITON = {
    "Linux AMD": _BUNDLED,
    "Intel": _BUNDLED,
    "unknown": "install the {package} that goes with PyTorch {pytorch}.",
    "Windows 2.15": f"(if there is none yet, use PyTorch 2.14 and triton-windows 3.8) {_PIP}",
    "": _PIP,
}
MISFIT = {
    "misfit no-triton": "PyTorch {pytorch} goes with Triton {wanted}: {install}",
    "misfit": "PyTorch {pytorch} goes with Triton {wanted}, not with {triton}: {install}",
    "": "Reinstall Triton: {install}",
}
NO_TRITON = {"no-triton": "Install Triton: {install}", **MISFIT}
# If a compiler does not find a file on a machine that lacks nothing, that file's name is a piece of an unquoted path.
_SPACED = (
    "PyTorch passes paths to the C++ compiler unquoted: move ComfyUI and its Python to folders without spaces and quotes in "
    "their paths (now {folder}; C++ is compiled in {cache}), and set the variable TMPDIR (Windows: TEMP) to one."
)
PYTHON_FILES = {
    "spaced": _SPACED,
    # The file that triton-windows' own guide names; it serves all patch versions of the same Python.
    "Windows": "Python's folders include and libs are missing, as in the portable ComfyUI: download "
    "python_{python}..._include_libs.zip from https://github.com/woct0rdho/triton-windows/releases/tag/v3.0.0-windows.post1 "
    "(or take an installed Python {python}) and copy both folders to {folder} (libs is not Lib).",
    "": "Install Python's headers (Debian, Ubuntu: sudo apt install python{python}-dev; Fedora: python3-devel).",
}
C_COMPILER = {
    "Windows": "triton-windows brings a C compiler since 3.2: {install}",
    "": "Install a C compiler (Debian, Ubuntu: sudo apt install build-essential; Fedora: gcc).",
}
CPP_COMPILER = {
    "Windows": "Install the Visual Studio Build Tools with the C++ workload; if cl is still not found, start ComfyUI from "
    "their x64 Native Tools Command Prompt.",
    "Darwin": "Install a C++ compiler (xcode-select --install).",
    "": "Install a C++ compiler (Debian, Ubuntu: sudo apt install g++; Fedora: gcc-c++).",
}
NO_GPU = "PyTorch sees no GPU: compiling works but gains nothing. With a graphics card, install PyTorch for it (pytorch.org)."
NO_CODE_FOR_GPU = {
    "AMD": "This PyTorch is not made for your GPU: install one for its architecture (AMD sorts ROCm wheels by gfx number). On "
    "Linux a card may run as a relative: start ComfyUI with HSA_OVERRIDE_GFX_VERSION=10.3.0 (RX 6000) or 11.0.0 (RX 7000).",
    "": "This PyTorch is not made for your GPU: install the newest from pytorch.org, with the Triton that it brings.",
}

_NO_HEADERS = {f"no-headers {key}": text for key, text in PYTHON_FILES.items()}
_NO_DRIVER = {k: f"This Triton has no driver for this GPU; is it one for another maker's? {t}" for k, t in MISFIT.items()}
_OTHER_DTYPE = "use a bf16, fp16 or GGUF version of the model"
_FP8 = {
    "NVIDIA 2.13": f"Triton has no such fp8 numbers for GPUs older than RTX 40, A100 among them: {_OTHER_DTYPE}.",
    "NVIDIA Windows": "On RTX 30 and A100 update PyTorch to 2.13 or newer (with triton-windows 3.5, 2.9 is enough), or "
    f"{_OTHER_DTYPE}.",
    "NVIDIA": f"On RTX 30 and A100 update PyTorch to 2.13 or newer, or {_OTHER_DTYPE}.",
    "": f"Triton has no such fp8 numbers for this GPU: {_OTHER_DTYPE}.",
}
_TCC = {
    **_NO_HEADERS,
    "": "The console of ComfyUI has what tcc.exe said. Python's folders include and libs must be those of Python {python}; "
    "keep the antivirus off {folder} and Temp; reinstall Triton: {install}",
}
_LINUX_COMPILER = {
    **_NO_HEADERS,
    "": "The C compiler failed; the console of ComfyUI has what it said.",
}
_DELETE = "Delete the folder .triton in your user folder: it was made with another Python or Triton."
_STALE_LAUNCHER = {**{key: f"{_DELETE} {text}" for key, text in _NO_HEADERS.items()}, "": _DELETE}
_XPU = {
    "Windows": "Update the Intel GPU driver. {install}",
    "": "Update the Intel GPU driver, install level-zero's headers (Debian, Ubuntu: libze-dev). {install}",
}
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
# PyTorch before 2.15 needs a user name to import inductor; a second import of the half-imported inductor: "already registered".
_NAMELESS = "This user has no name, as in a container: set the variable USER before ComfyUI starts (docker run -e USER=me)."
_LANGUAGE = "The C++ compiler must speak English: add that language pack in the Visual Studio Installer."
_MEMORY = "There was too little memory to compile the block; the next runs try again, three times at most."
_OLD_GPU = "This GPU is too old for Triton (compute capability 7.0 is needed); use backend aot_eager or none."
_CPP_FAILED = {
    "spaced": _SPACED,
    "": "The C++ compiler failed; check that g++ (Windows: Visual Studio Build Tools) is complete.",
}
_GRAPH_BREAK = "The block has code that PyTorch cannot trace; set fullgraph to false, or leave the block out with only_blocks."
OTHERWISE = "Try backend aot_eager or mode default; leave the block out with only_blocks if the error stays."

_FILE = r"(Python\.h|pyconfig\.h|python3\d*\.lib)"
# For each error: its name in docs/troubleshooting.md; a pattern of "Class: text"; the cure. The most specific pattern first.
TROUBLES: tuple[tuple[str, str, Cure], ...] = (
    ("fp8e4nv", r"fp8e4nv [^\n]*not supported", _FP8),
    ("Python.h", rf"{_FILE}\W{{1,4}}(No such file|(file )?not found)|LNK1104[^\n]*{_FILE}", PYTHON_FILES),
    ("ze_api.h", r"level_zero/ze_api\.h|sycl/sycl\.hpp|sycl headers not found|spirv_utils|\[ZE\]|ZE_RESULT_ERROR", _XPU),
    ("tcc.exe", r"\btcc\.exe'", _TCC),
    ("ptxas", r"ptxas\S*\s+fatal\s*: Value 'sm_\w+'|ptxas'[^\n]*--gpu-name=sm_\w+", _OLD_TRITON),
    ("libtriton", r"DLL load failed while importing libtriton", _RUNTIME),
    ("cuda_utils", r"DLL load failed while importing (cuda_utils|hip_utils|__triton_launcher)", _STALE_LAUNCHER),
    ("triton_key", r"cannot import name '\w+' from 'triton\b|No module named 'triton\.", MISFIT),
    ("CompiledKernel", r"(KernelMetadata|CompiledKernel)'? (object )?(has no|does not has)", MISFIT),
    ("active drivers", r"\b0 active drivers", _NO_DRIVER),
    ("TritonMissing", r"TritonMissing|Cannot find a working triton|No module named 'triton'", NO_TRITON),
    ("Failed to find C compiler", r"Failed to find C compiler", C_COMPILER),
    ("cl is not found", r"Compiler: .+ is not found|InvalidCxxCompiler:", CPP_COMPILER),
    ("HIP error", r"hipErrorNoBinaryForGpu|HIP error: invalid device function|no kernel image is", NO_CODE_FOR_GPU),
    ("TRITON_HIP_LLD_PATH", r"TRITON_HIP_LLD_PATH", _ROCM_LINKER),
    ("metal", r"failed to compile\s+#include <c10/metal", _METAL),
    ("No such file or directory", r"No such file or directory: '[A-Za-z]:[^'\n]{200,}'|WinError 206", _LONG_PATH),
    ("UnicodeDecodeError", r"UnicodeDecodeError: 'utf-8' codec can't decode", _LANGUAGE),
    ("codec can't decode", r"UnicodeDecodeError: '[\w-]+' codec can't decode", _UTF8),
    ("already registered", r"getpwuid\(\)|No username set in|Artifact of type=\w+ already registered", _NAMELESS),
    ("CalledProcessError", r"CalledProcessError: [^\n]*\.c(pp)?'", _LINUX_COMPILER),
    ("", r"^(OutOfMemory|Memory)Error:|(error|Triton Error \[\w+\]): out of memory|DefaultCPUAllocator:", _MEMORY),
    ("GPUTooOldForTriton", r"^GPUTooOldForTriton:", _OLD_GPU),
    ("CppCompileError", r"^CppCompileError:", _CPP_FAILED),
    ("Unsupported", r"^Unsupported:", _GRAPH_BREAK),
    ("UserError", r"^UserError:", "The block has code that PyTorch cannot trace; leave the block out with only_blocks."),
)
# Errors that the next run may not meet: a worker died; another thread switched a setting of the process (TF32) during the trace
# (torch/_dynamo/convert_frame.py, guards.py); gcc, clang or ptxas was killed or had no room.
MAY_PASS = (
    r"^(BrokenProcessPool|SubprocException):"
    r"|^AssertionError: [\s\S]*(state changed while dynamo tracing|GLOBAL_STATE changed)"
    r"|^CppCompileError:[\s\S]*(No space left on device|Disk quota exceeded|Killed|signal 9|SIGKILL|out of memory allocating)"
)


def diagnose(errors: Iterable[BaseException]) -> tuple[BaseException, str, Cure] | None:
    """Match an error and its causes (outermost first) with TROUBLES: returns the error that matches, its line, the cure."""
    innermost_first = [(error, text_of(error)) for error in errors][::-1]
    for _, pattern, cure in TROUBLES:
        for error, text in innermost_first:
            match = re.search(pattern, text)
            if match is not None:
                return error, sentence(error, text.rfind("\n", 0, match.start()) + 1), cure
    return None


def message_of(error: BaseException) -> str:
    """The text of an error; empty if `str` fails, as with some classes of other packs."""
    try:
        return str(error).strip()
    except Exception:
        return ""


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error).partition(chr(10))[0]}"


def text_of(error: BaseException) -> str:
    name, text = type(error).__name__, message_of(error) or "no message"
    return text if text.startswith(f"{name}:") else f"{name}: {text}"


def sentence(error: BaseException, start: int = 0) -> str:
    """The line of the error's text that begins at `start`; of a long line its beginning and its end."""
    name, line = type(error).__name__, text_of(error)[start:].partition("\n")[0].strip()
    line = line if line.startswith(f"{name}:") else f"{name}: {line}"
    line = line if len(line) <= 240 else f"{line[:160]} ... {line[-60:]}"
    return line if line.endswith(".") else f"{line}."
