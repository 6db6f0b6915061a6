"""Errors of Triton, compilers and drivers, in the words in which people have met them, and the cure for each machine."""

import itertools
import os
import re
from subprocess import CalledProcessError

import pytest
import torch
from support import ROOT

PORTABLE = r"D:\ComfyUI_windows_portable\python_embeded"


def error_class(name, base=RuntimeError):
    """As Triton's, which is not installed everywhere, or PyTorch's, whose arguments differ by version."""
    return type(name, (base,), {})


CompilationError, TritonMissing, SubprocException = (
    error_class(name, Exception) for name in ("CompilationError", "TritonMissing", "SubprocException")
)
CppCompileError, GPUTooOldForTriton, Unsupported, UserError, InvalidCxxCompiler = map(
    error_class, ("CppCompileError", "GPUTooOldForTriton", "Unsupported", "UserError", "InvalidCxxCompiler")
)


def command(*parts, status=1):
    return CalledProcessError(status, list(parts))


# woct0rdho/triton-windows#156, Comfy-Org/ComfyUI#8608, #10521
TCC = command(
    PORTABLE + r"\Lib\site-packages\triton\runtime\tcc\tcc.exe", r"C:\Users\Aorus\AppData\Local\Temp\tmpenzlzf6h\cuda_utils.c",
    "-O3", "-shared", "-Wno-psabi", "-o", r"C:\Users\Aorus\AppData\Local\Temp\tmpenzlzf6h\cuda_utils.cp313-win_amd64.pyd",
    "-fPIC", "-D_Py_USE_GCC_BUILTIN_ATOMICS", "-lcuda", "-lpython313",
    "-L" + PORTABLE + r"\Lib\site-packages\triton\backends\nvidia\lib", "-I" + PORTABLE + r"\Include",
)  # fmt: skip
# patientx-cfz/comfyui-rocm#72
TCC_OF_AMD = command(r"D:\comfyui\python_env\Lib\site-packages\triton\runtime\tcc\tcc.exe", r"C:\Temp\tmpc9zutges\hip_utils.c")
# kijai/ComfyUI-WanVideoWrapper#1030, #724, #1583; pytorch/pytorch#167082
FP8 = CompilationError(
    "at 1:0:\ndef triton_poi_fused__to_copy_mul_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n^\n"
    "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")"
)
# woct0rdho/triton-windows#30
OLDER_FP8 = AssertionError("fp8e4nv data type is not supported on CUDA arch < 89")
# SeedVR2_VideoUpscaler#516, pytorch/pytorch#157458
NO_CL = RuntimeError("Compiler: cl is not found.")
# comfyui_HiDream-Sampler#52, triton-windows#83: what cl prints is in the error of PyTorch's own C++ code
NO_HEADER = CppCompileError(
    "C++ compile error\n\nCommand:\ncl /I D:/ComfyUI_windows_portable/python_embeded/Include /LIBPATH:D:/python_embeded/libs "
    "torch.lib\n\nOutput:\nmain.cpp(12): fatal error C1083: Cannot open include file: 'Python.h': No such file or directory"
)
SPLIT = CppCompileError(
    "C++ compile error\n\nCommand:\ncl C:/Users/Jane Doe/x/main.cpp\n\nOutput:\nc1xx: fatal error C1083: "
    "Cannot open source file: 'C:/Users/Jane': No such file or directory"
)
# ComfyUI-ReActor#198
NO_LIBRARY = CppCompileError("C++ compile error\n\nOutput:\nLINK : fatal error LNK1104: cannot open file 'python313.lib'")
# sgl-project/sglang#18644, ComfyUI-TeaCache#126: gcc's own words are above in the log
GCC = command(
    "/usr/bin/gcc", "/tmp/tmpcstpn00b/cuda_utils.c", "-O3", "-shared", "-fPIC", "-Wno-psabi",
    "-o", "/tmp/tmpcstpn00b/cuda_utils.cpython-312-x86_64-linux-gnu.so", "-lcuda", "-I/usr/include/python3.12",
)  # fmt: skip
# Comfy-Org/ComfyUI#10470, triton-windows#158
NO_KEY = ImportError(
    r"cannot import name 'triton_key' from 'triton.compiler.compiler' "
    r"(E:\ComfyUI\python_embeded\Lib\site-packages\triton\compiler\compiler.py)"
)
# kijai/ComfyUI-KJNodes#212, Comfy-Org/ComfyUI#7106
NO_DESCRIPTOR = ImportError("cannot import name 'AttrsDescriptor' from 'triton.compiler.compiler' (I:\\triton\\compiler.py)")
# ComfyUI-HunyuanVideo-Foley#5, unslothai/unsloth#4001
NO_CLUSTERS = AttributeError("'KernelMetadata' object has no attribute 'cluster_dims'")
# triton-windows#137
NO_HOOK = AttributeError("type object 'CompiledKernel' has no attribute 'launch_enter_hook'")
# kijai/ComfyUI-WanVideoWrapper#1400
NO_TRITON = TritonMissing(
    "Cannot find a working triton installation. Either the package is not installed or it is too old. More information on "
    "installing Triton can be found at: https://github.com/triton-lang/triton"
)
# Zonos-for-windows#51, mindee/doctr#2021
NO_DRIVER = RuntimeError("0 active drivers ([]). There should only be one.")
# triton-windows#64, ComfyUI-HunyuanLoom#29
NO_UTILS = ImportError("DLL load failed while importing cuda_utils: The specified module could not be found.")
# triton-windows#58, ComfyUI-HunyuanVideoWrapper#296
NO_LIBTRITON = ImportError(
    "DLL load failed while importing libtriton: A dynamic link library (DLL) initialization routine failed."
)
# kijai/ComfyUI-WanVideoWrapper#655, Comfy-Org/ComfyUI#5216
NO_C_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
# fishaudio/fish-speech#907
OLD_PTXAS = command(
    "/env/site-packages/triton/backends/nvidia/bin/ptxas", "-lineinfo", "-v", "--gpu-name=sm_120", "/tmp/tmpdy7p.ptx",
    status=255,
)  # fmt: skip
# triton-lang/triton#8539
NO_SPARK = RuntimeError(
    "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"
)
# pytorch/pytorch#164346 (in ComfyUI), #147626
NO_DEVICE_FUNCTION = RuntimeError("HIP error: invalid device function\nHIP kernel errors might be asynchronously reported")
# stable-diffusion-webui#5067, ROCm/legacy-rocm-build#2061
NO_BINARY = RuntimeError("hipErrorNoBinaryForGpu: Unable to find code object for all current devices!")
# kyuz0/amd-strix-halo-voice-toolbox#1, ROCm/TheRock#2006
NO_LLD = Exception("ROCm linker /opt/rocm/llvm/bin/ld.lld not found. Set 'TRITON_HIP_LLD_PATH' to its path.")
# intel/intel-xpu-backend-for-triton#3064
NO_LEVEL_ZERO = command(
    r"C:\Program Files (x86)\Intel\oneAPI\compiler\latest\bin\icpx.EXE", r"C:\Temp\tmpr3g8gym8\main.cpp", "-lze_loader",
    "-o", r"C:\Temp\tmpr3g8gym8\spirv_utils.cp310-win_amd64.pyd", "-fsycl",
)  # fmt: skip
# pytorch/pytorch#151898
ZE = RuntimeError("Triton Error [ZE]: 0x78000011")
# intel/intel-xpu-backend-for-triton#2027
NO_SYCL = AssertionError("sycl headers not found, please install `icpx` compiler, or provide `ONEAPI_ROOT` environment")
# pytorch/pytorch#158199, #150121
METAL = SyntaxError(
    "failed to compile \n    #include <c10/metal/random.h>\n    #include <c10/metal/special_math.h>\n    kernel"
)
# kijai/ComfyUI-KJNodes#312, #415; triton-windows#159
LONG_PATH = FileNotFoundError(
    2, "No such file or directory",
    r"C:\Users\nekod\AppData\Local\Temp\torchinductor_nekod\triton\0\WNOH2P4BAZTHM4ADJMJ2MB4NOU2JWTLS4ZZPUPSMK42TUHMWETFA"
    r"\tmp.pid_17396_ac66eb93-ba17-41e0-a0ae-0b6cbecc99ad"
    r"\__grp__triton_red_fused__to_copy_add_div_gt_linalg_vector_norm_mul_nan_to_num_sub_where_5.json",
)  # fmt: skip
# comfyui-sdnq#12, WanVideoWrapper#1802
CHINESE = UnicodeDecodeError("utf-8", b"\xd3", 0, 1, "invalid continuation byte")
KOREAN = UnicodeDecodeError("cp949", b"\xe2\x80", 0, 1, "illegal multibyte sequence")
# Of a user without a name: Python's, its from 3.13 on, and PyTorch's at the second try
NAMELESS = KeyError("getpwuid(): uid not found: 1000")
NAMELESS_313 = OSError("No username set in the environment")
NAMELESS_AGAIN = AssertionError("Artifact of type=inductor already registered in mega-cache artifact factory")


@pytest.fixture
def machine(engine):
    def make(system="Windows", gpu="NVIDIA", pytorch=(2, 11), triton=(3, 6), missing=(), folder=PORTABLE, cache=""):
        return engine("failures.machine").Machine(system, gpu, pytorch, (3, 13), triton, folder, missing, cache)

    return make


@pytest.fixture
def failure(engine):
    """failure(error, machine): how it is described when PyTorch has wrapped it as it does."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError

    def describe(error, machine, wrapped=True):
        if wrapped == "as a cause":
            error, cause = RuntimeError("backend failed"), error
            error.__cause__ = cause
        elif wrapped:
            error = InductorError(error, None) if wrapped == "inductor" else BackendCompilerFailed(_inductor, error, None)
        return engine("failures.describe").describe_failure("Block", error, machine)

    def _inductor():
        pass

    return describe


CURES = [
    (TCC, {"missing": ("Include/Python.h",)}, rf"python_3\.13\.\.\._include_libs.*copy both folders to {re.escape(PORTABLE)} "),
    (TCC, {}, r"antivirus off D:\\ComfyUI.*python_embeded\\python\.exe -m pip install -U \"triton-windows==3\.6\.\*\""),
    (TCC_OF_AMD, {"gpu": "AMD"}, r"antivirus.*triton-windows==3\.6"),
    (FP8, {}, r"RTX 30 and A100 update PyTorch to 2\.13 or newer \(with triton-windows 3\.5.*bf16, fp16 or GGUF"),
    (FP8, {"system": "Linux"}, r"update PyTorch to 2\.13 or newer, or use a bf16"),
    (FP8, {"pytorch": (2, 13)}, r"^Triton has no such fp8 numbers .*: use a bf16"),
    (FP8, {"gpu": "AMD", "system": "Linux"}, r"for this GPU: use a bf16"),
    (OLDER_FP8, {}, r"2\.13"),
    (NO_CL, {}, r"Visual Studio Build Tools with the C\+\+ workload"),
    (NO_CL, {"system": "Linux"}, r"apt install g\+\+"),
    (NO_HEADER, {}, r"or take an installed Python 3\.13\) and copy both"),
    (NO_LIBRARY, {}, r"or take an installed Python 3\.13\) and copy both"),
    (GCC, {"system": "Linux", "missing": ("/usr/include/python3.13/Python.h",)}, r"apt install python3\.13-dev"),
    (GCC, {"system": "Linux"}, r"the console of ComfyUI has what it said"),
    (NO_KEY, {"pytorch": (2, 8), "triton": (3, 5)}, r"^PyTorch 2\.8 goes with Triton 3\.4, not with 3\.5: .*windows==3\.4"),
    (NO_KEY, {"system": "Linux", "pytorch": (2, 8), "folder": "/usr"}, r": python -m pip install -U \"triton==3\.4\.\*\""),
    (NO_DESCRIPTOR, {"pytorch": (2, 6), "triton": (3, 3)}, r"Triton 3\.2, not with 3\.3"),
    (NO_CLUSTERS, {"pytorch": (2, 9), "triton": (3, 6)}, r"Triton 3\.5, not with 3\.6"),
    (NO_HOOK, {"pytorch": (2, 7), "triton": (3, 4)}, r"Triton 3\.3, not with 3\.4"),
    (NO_KEY, {}, r"^Reinstall Triton: .*triton-windows==3\.6"),
    (NO_KEY, {"pytorch": (3, 1)}, r"the triton-windows that goes with PyTorch 3\.1"),
    (NO_TRITON, {"triton": None}, r"^Install Triton: .*triton-windows==3\.6\.\*"),
    (NO_TRITON, {"triton": None, "pytorch": (2, 15)}, r"if there is none yet, use PyTorch 2\.14 .*==3\.9\.\*\"$"),
    (NO_TRITON, {"triton": (3, 1)}, r"Triton 3\.6, not with 3\.1"),
    (NO_TRITON, {"triton": None, "gpu": "AMD", "system": "Linux"}, r"pytorch-triton-rocm, triton-rocm.*from its rocm index"),
    (NO_TRITON, {"triton": None, "gpu": "Intel"}, r"pytorch-triton-xpu, triton-xpu.*from its xpu index"),
    (NO_DRIVER, {"gpu": "AMD", "system": "Linux"}, r"another maker's.*uninstall triton and reinstall PyTorch from"),
    (NO_UTILS, {}, r"Delete the folder \.triton"),
    (NO_UTILS, {"missing": ("Python.h",)}, r"Delete the folder \.triton.*copy both"),
    (NO_LIBTRITON, {}, r"Visual C\+\+ Redistributable"),
    (InvalidCxxCompiler("No working C++ compiler"), {"system": "Linux"}, r"g\+\+"),
    (NO_C_COMPILER, {}, r"brings a C compiler since 3\.2: .*triton-windows==3\.6"),
    (NO_C_COMPILER, {"system": "Linux"}, r"^Install a C compiler .*build-essential"),
    (OLD_PTXAS, {"system": "Linux"}, r"does not know your GPU: update PyTorch"),
    (NO_SPARK, {"system": "Linux"}, r"TRITON_PTXAS_PATH"),
    (NO_DEVICE_FUNCTION, {"gpu": "AMD", "system": "Linux"}, r"HSA_OVERRIDE_GFX_VERSION=10\.3\.0"),
    (NO_BINARY, {"gpu": "AMD", "system": "Linux"}, r"HSA_OVERRIDE_GFX_VERSION=10\.3\.0"),
    (NO_LLD, {"gpu": "AMD", "system": "Linux"}, r"rocm-sdk path --root"),
    (NO_LEVEL_ZERO, {"gpu": "Intel"}, r"^Update the Intel GPU driver\. .*xpu index"),
    (ZE, {"gpu": "Intel", "system": "Linux"}, r"Intel GPU driver, install level-zero's headers"),
    (NO_SYCL, {"gpu": "Intel", "system": "Linux"}, r"xpu index"),
    (METAL, {"gpu": "Apple", "system": "Darwin"}, r"prototype.*aot_eager"),
    (LONG_PATH, {}, r"LongPathsEnabled"),
    (KOREAN, {}, r"PYTHONUTF8=1 before ComfyUI starts"),
    (CHINESE, {}, r"English"),
    (NAMELESS, {"system": "Linux"}, r"set the variable USER before"),
    (NAMELESS_313, {"system": "Linux"}, r"docker run -e USER=me"),
    (NAMELESS_AGAIN, {"system": "Linux"}, r"docker run -e USER=me"),
    (torch.OutOfMemoryError("CUDA out of memory."), {}, r"^There was too little memory to compile the block"),
    (GPUTooOldForTriton("Found GTX 1080"), {}, r"^This GPU is too old for Triton"),
    (CppCompileError("C++ compile error\n\nOutput:\nmain.cpp:3: error"), {}, r"^The C\+\+ compiler failed; check that g\+\+"),
    (NO_HEADER, {"folder": r"C:\My AI\python_embeded"}, r"unquoted: move ComfyUI and its Python .*C:\\My AI"),
    (SPLIT, {"cache": "C:/Users/Jane Doe"}, r"unquoted.*compiled in C:/Users/Jane Doe\), and set the variable TMPDIR"),
    (SPLIT, {"system": "Linux", "folder": "/opt/it's", "missing": ("Python.h",)}, r"check that g\+\+"),
    (Unsupported("call_function"), {}, r"set fullgraph to false, or"),
    (UserError("dynamic"), {}, r"cannot trace; leave the block out"),
]  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, "backend", "inductor", "as a cause"])
@pytest.mark.parametrize(
    ("error", "here", "cure"), CURES, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else ""
)
def test_each_error_has_its_cure(machine, failure, error, here, cure, wrapped):
    description = failure(error, machine(**here), wrapped)
    assert re.search(cure, description.cure), description.cure
    assert len(description.reason) < 280 and not re.search(r"[\n{}]", description.cure) and "\n" not in description.message()


@pytest.mark.parametrize("wrapped", [False, "backend", "inductor"])
@pytest.mark.parametrize("error", [error for error, _, _ in CURES], ids=repr)
def test_what_has_a_cure_does_not_pass_by_itself(failure, machine, error, wrapped):
    """Whatever PyTorch has raised the error from, and if it is one of the system itself: a path that is too long."""
    cause = FileNotFoundError(2, "The system cannot find the file specified")
    try:
        raise error from cause
    except type(error) as raised:
        assert failure(raised, machine(), wrapped).may_pass is isinstance(error, torch.OutOfMemoryError)
    finally:
        error.__cause__ = error.__context__ = None


@pytest.mark.parametrize("wrapped", [False, "backend", "inductor"])
def test_an_error_of_the_system_may_pass_also_after_another_was_handled(failure, machine, wrapped):
    try:
        try:
            raise NO_CL
        except RuntimeError:
            raise OSError(28, "No space left on device")  # noqa: B904
    except OSError as error:
        assert failure(error, machine(), wrapped).may_pass
    finally:
        NO_CL.__context__ = None


def test_all_that_are_known_are_met_here_and_in_the_table(engine, machine):
    table = engine("failures.table")
    met = set()
    for error, _, _ in CURES:
        cure = table.diagnose([error])[2]
        met |= {pattern for _, pattern, text in table.TROUBLES if text is cure and re.search(pattern, table.text_of(error))}
    assert met == {pattern for _, pattern, _ in table.TROUBLES}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name, _, _ in table.TROUBLES if name not in page] == []


def test_each_cure_has_a_text_for_each_machine(engine, machine):
    table = engine("failures.table")
    for system, gpu, pytorch, triton, missing in itertools.product(
        ("Windows", "Linux", "Darwin"), ("NVIDIA", "AMD", "Intel", "Apple", ""), (*table.TRITON_FOR, (2, 5), (3, 1)),
        (None, (3, 4), (3, 9)), ((), ("Python.h",)),
    ):  # fmt: skip
        here = machine(system, gpu, pytorch, triton, missing)
        for _, _, cure in table.TROUBLES:
            assert not re.search(r"[{}]|  |: \.|None|with [.:]", here.cure(cure))


def test_the_reason_is_the_line_that_says_it(failure, machine):
    assert failure(FP8, machine()).reason.startswith('CompilationError: ValueError("type fp8e4nv not supported in this')
    reason = failure(TCC, machine()).reason
    assert "tcc.exe" in reason and reason.endswith("returned non-zero exit status 1.")


def test_what_a_worker_process_met_is_known_by_its_text(failure, machine):
    text = f'An exception occurred in a subprocess:\n\nTraceback (most recent call last):\n  File "x"\nCompilationError: {FP8}'
    assert "2.13" in failure(SubprocException(text), machine()).cure


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a script")
def test_what_a_compiler_of_triton_said_is_on_the_console(failure, machine, monkeypatch, tmp_path, capfd):
    """As the cure says. What PyTorch's own C++ compiler said is in its error."""
    build = pytest.importorskip("triton.runtime.build")
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho what it said >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(CalledProcessError) as raised:
        build._build("cuda_utils", str(tmp_path / "cuda_utils.c"), str(tmp_path), [], [], [], [])
    assert "what it said" in capfd.readouterr().err
    assert "the console of ComfyUI has what it said" in failure(raised.value, machine("Linux")).cure


def test_other_errors_keep_their_own_cures(failure, machine):
    plain = failure(RuntimeError("no kernel for this"), machine())
    assert "aot_eager" in plain.cure and plain.reason == "RuntimeError: no kernel for this."
    missing = failure(FileNotFoundError(2, "No such file or directory", "/tmp/short"), machine())
    assert "LongPathsEnabled" not in missing.cure
    cpp = failure(CppCompileError("C++ compile error\n\nCommand:\ncl /I C:/python_embeded/Include python312.lib"), machine())
    assert "The C++ compiler failed" in cpp.cure


def test_this_machine_is_found(engine):
    here = engine("failures.machine").Machine.this()
    assert here.system in ("Windows", "Linux", "Darwin") and here.pytorch == tuple(map(int, torch.__version__.split(".")[:2]))
    assert here.cure({"": "{install}"})
    assert engine("failures.describe").describe_failure("Block", NO_CL).cure


def test_the_table_of_tritons_agrees_with_the_installed_pytorch(engine):
    from importlib.metadata import requires

    (asked,) = [line for line in requires("torch") if line.startswith("triton")] or [None]
    if asked is None:
        pytest.skip("this PyTorch asks for no Triton")
    version = tuple(map(int, re.search(r"(\d+)\.(\d+)", asked).groups()))
    assert engine("failures.table").TRITON_FOR[engine("failures.machine").Machine.this().pytorch] == version
