"""Libraries of C++ kernels travel with each graph that they are loaded for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from traced_graphs import request


@pytest.fixture
def process(engine, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # for two small kernels they cost more than they save
    process = engine("compile_process.client").CompileProcess()
    yield process
    process.stop()


def wave(x):
    return torch.sin(x) + 1


def wave_and_product(x):
    return torch.mm(torch.sin(x) + 1, x)


@pytest.mark.rest
def test_a_kernel_that_an_earlier_graph_has_had_built_goes_with_the_later_one_too(engine, process, monkeypatch):
    """Each is kept in an entry of its own; after a restart, on another machine, the earlier graph may never be asked for."""
    loading, x = engine("compile_process.obtain"), torch.linspace(0, 1, 16).view(4, 4)
    first, second = (process.lower(request(engine, f, x).text) for f in (wave, wave_and_product))
    assert first.files and first.files.items() == second.files.items(), "the kernel is the same"
    another = engine("compile_process.client").CompileProcess()
    monkeypatch.setattr(loading, "compile_process", another)
    built, popen = [], subprocess.Popen.__init__

    def counted(self, args, *more, **named):
        built.append(args if isinstance(args, str) else " ".join(args))
        popen(self, args, *more, **named)

    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    try:
        # Here inductor else has the C++ compiler preprocess PyTorch's headers, though all kernels are built.
        with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
            (result,) = loading.load(second)(x)
    finally:
        another.stop()
    assert torch.allclose(result, wave_and_product(x))
    assert not [command for command in built if " -o " in command or " -E " in command], "nothing is built here"
