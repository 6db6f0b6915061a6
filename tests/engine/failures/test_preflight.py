"""What is told of a machine before anything is compiled."""

import pytest

COMPILERS = {"C": "gcc", "C++": "g++"}


@pytest.fixture
def preflight(engine):
    return engine("failures.machine")


@pytest.fixture
def machine(preflight):
    def make(**other):
        usual = {"system": "Linux", "gpu": "NVIDIA", "pytorch": (2, 11), "python": (3, 12), "triton": (3, 6), "folder": "/usr"}
        return preflight.Machine(**{**usual, **other})

    return make


def test_of_a_machine_that_has_all_nothing_is_missing(preflight, machine):
    here, missing = preflight.preflight(machine(), preflight.Gpu("RTX 4090", (8, 9)), COMPILERS)
    assert not missing
    assert here == "Linux, RTX 4090, PyTorch 2.11 (tested), Triton 3.6, Python 3.12, C: gcc, C++: g++"
    # Without a GPU neither Triton nor a C compiler is needed.
    assert preflight.preflight(machine(triton=None, gpu=""), None, {"C": None, "C++": "clang++"})[1] == []


@pytest.mark.parametrize("version", [(2, 8), (2, 16), (3, 0)])
def test_a_pytorch_that_is_not_tested_is_told(preflight, machine, version):
    here, _ = preflight.preflight(machine(pytorch=version), None, COMPILERS)
    number = ".".join(map(str, version))
    assert f"PyTorch {number} (not tested with this pack, which is tested with 2.9 to 2.15), " in here


@pytest.mark.parametrize(
    ("other", "gpu", "compilers", "said"),
    [
        ({"triton": None}, {}, {}, 'Install Triton: python -m pip install -U "triton==3.6.*"\n'),
        ({"triton": (3, 2)}, {}, {}, "PyTorch 2.11 goes with Triton 3.6, not with 3.2"),
        ({"triton": None, "system": "Windows"}, {}, {}, 'triton-windows==3.6.*"\n'),
        ({"missing": ("/usr/include/python3.12/Python.h",)}, {}, {}, "sudo apt install python3.12-dev"),
        ({}, {}, {"C": None}, "sudo apt install build-essential"),
        ({}, {"capability": (6, 1)}, {}, "GPU {0} has compute capability 6.1, and Triton needs 7.0: set backend to aot_eager"),
        ({}, {"has_code": False}, {}, "not made for your GPU"),
        ({"triton": None, "pytorch": (2, 16)}, {}, {}, "Install Triton: install the triton that goes with PyTorch 2.16."),
    ],
)
def test_what_is_missing_is_told_with_its_cure(preflight, machine, other, gpu, compilers, said):
    gpu = preflight.Gpu(**{"name": "GPU {0}", "capability": (9, 0), **gpu})
    (missing,) = preflight.preflight(machine(**other), gpu, {**COMPILERS, **compilers})[1]
    assert said in f"{missing}\n", "a command stands last, to be copied with nothing after it"


def test_the_cpu_needs_a_cpp_compiler(preflight, machine):
    assert "sudo apt install g++" in preflight.preflight(machine(), None, {"C": "gcc", "C++": None})[1][0]
    on_windows = preflight.preflight(machine(system="Windows"), None, {"C": None, "C++": None})[1]
    assert len(on_windows) == 1 and "Visual Studio Build Tools" in on_windows[0]


def test_windows_has_triton_bring_its_c_compiler(preflight, machine):
    assert preflight.preflight(machine(system="Windows"), preflight.Gpu("GPU", (8, 6)), {"C": None, "C++": None})[1] == []


@pytest.mark.parametrize(
    ("kinds", "capability", "has_code"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80", "sm_90a"], (8, 6), True),
        (["sm_86", "sm_90"], (8, 0), False),
        (["sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_75", "compute_120"], (7, 0), False),
        (["sm_100", "sm_120"], (12, 0), True),
    ],
)
def test_kernels_of_pytorch_for_a_gpu(preflight, monkeypatch, kinds, capability, has_code):
    monkeypatch.setattr(preflight.torch.cuda, "get_arch_list", lambda: kinds)
    assert preflight._has_code(capability) is has_code


def test_this_machine_can_compile(preflight, monkeypatch):
    here, missing = preflight.preflight_here()
    no_gpu = ["PyTorch sees no GPU"] if preflight.Gpu.this() is None else []
    assert "PyTorch" in here and [line[:19] for line in missing] == no_gpu
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    if preflight.Gpu.this() is None:
        assert "C++: none" in preflight.preflight_here()[0] and len(preflight.preflight_here()[1]) == 2


def test_the_driver_of_the_gpu_is_told_where_it_is_known(preflight, machine):
    gpu = preflight.Gpu("RTX 4090", (8, 9), driver="580.65.06")
    assert "RTX 4090 (driver 580.65.06), PyTorch" in preflight.preflight(machine(), gpu, COMPILERS)[0]
    assert preflight._driver() == "" or preflight.Gpu.this() is not None
