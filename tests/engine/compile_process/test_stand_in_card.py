"""The compile process lowers for a card that it does not see: here for one that is not there, and needs no driver."""

import contextlib
import os
import re
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from support import prebuild_command
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from devtools.server import wait_until

sys.path.append(str(Path(__file__).parent))
from traced_graphs import ROOT, traced

H100, RTX_4090 = (prebuild_command().known_cards()[name] for name in ("h100", "rtx4090"))
pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch is built without CUDA")


def stop(engine):
    compile_process = engine("compile_process.client").compile_process
    compile_process.stop()
    compile_process.refusal = None


def described(engine, monkeypatch, cards):
    """The compile process, to which these cards are described; and what is asked of the driver is answered."""
    monkeypatch.setattr(engine("torch_compat.stand_in_card"), "describe", lambda: cards)
    # What lowering_settings notes of the card of a graph.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: cards[0]["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (cards[0]["major"], cards[0]["minor"]))
    return engine("compile_process.client").compile_process


@pytest.fixture
def process(engine, monkeypatch):
    """A new process, and the cards that it will be told of."""
    stop(engine)
    cards = []
    yield described(engine, monkeypatch, cards), cards
    stop(engine)


@pytest.fixture(scope="class")
def of_h100(engine):
    """One for all tests of a class, to which an H100 is described."""
    stop(engine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield described(engine, monkeypatch, [H100])
    stop(engine)


class Block(nn.Module):
    def forward(self, x, weight, scale):
        constant = torch.ones(1, device=x.device) * torch.tensor(0.5).to(x.device)  # folded while it is lowered
        y = nn.functional.layer_norm(x, x.shape[-1:]) * (constant + scale)
        q = (y @ weight).view(x.shape[0], -1, 4, 64).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)
        # `contiguous` enters the device of its tensor in C++, also that of a fake one.
        normed = nn.functional.group_norm(attended.transpose(1, 2).contiguous(), 32)
        return x + nn.functional.gelu(normed.transpose(1, 2), approximate="tanh")


def request_of(engine, options, block=None, *weights, shape=(2, 128, 256)):
    obtain, requests = engine("compile_process.obtain"), []
    weights = weights or (((256, 256), torch.bfloat16), ((2, 1, 256), torch.bfloat16))
    with FakeTensorMode():
        shapes = (shape, torch.bfloat16), *weights
        inputs = [torch.empty(size, device="cuda", dtype=dtype) for size, dtype in shapes]

    def use(graph, fakes):
        requests.append(obtain.request_for(graph, fakes, options, torch.device("cuda", 0)))

    with contextlib.suppress(RuntimeError):  # what was traced also runs, on fake tensors, and may look for a driver
        traced(engine, block or Block(), *inputs, use=use)
    (request,) = requests
    return request


def check_kernels(engine, compile_process, monkeypatch, architecture):
    monkeypatch.setattr(engine("torch_compat.attention"), "kernel_for", lambda _node, _enabled: "flash_attention")
    request = request_of(engine, engine("settings").CompileSettings().inductor_options())
    assert "attention.flash_attention" in request.text
    artefact = compile_process.lower(request.text, measures=request.measures).artefact
    cubins = [at.start() for at in re.finditer(b"\x7fELF", artefact)]
    assert cubins
    for at in cubins:  # the first byte of its flags, or, by the version of the format, the second (EF_CUDA_SM)
        flags = struct.unpack_from("<BB", artefact, at + 48)
        assert architecture in flags, flags
    assert b"_scaled_dot_product_flash_attention" in artefact
    assert not compile_process._running.sees_cards


def test_kernels_are_for_the_card_that_was_described(engine, process, monkeypatch):
    """Those for an H100: below."""
    compile_process, cards = process
    cards.append(RTX_4090)
    check_kernels(engine, compile_process, monkeypatch, 89)


class Quantised(nn.Module):
    """A layer whose product is in the format itself (comfy/ops.py, `mixed_precision_ops`)."""

    def __init__(self, layout, tensors):
        super().__init__()
        self.layout, self.tensors = layout, tensors

    def forward(self, x, weight, scale):
        params = self.tensors.get_layout_class(self.layout).Params
        weight = self.tensors.QuantizedTensor(
            weight, self.layout, params(scale=scale, orig_dtype=torch.bfloat16, orig_shape=(256, 256))
        )
        return x + nn.functional.linear(self.tensors.QuantizedTensor.from_float(x.view(-1, 256), self.layout), weight).view(
            x.shape
        )


# Its driver is a stand-in, which says of each kernel that it uses so many registers.
LOADS = """
import importlib, inspect, sys, types, torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import static_triton_launcher
has_module = "self.module" in inspect.getsource(static_triton_launcher)  # newer ones also return it
class Launcher:
    _load_kernel = staticmethod(lambda *args: (1,) * has_module + (1, 255, 0))
torch._C._StaticCudaLauncher = Launcher
for name in "exchange_device", "maybe_exchange_device":
    setattr(CudaInterface, name, staticmethod(lambda device: 0))
CudaInterface.current_device = staticmethod(lambda: 0)
CudaInterface.synchronize = staticmethod(lambda device=None: None)
sys.modules["kit"] = package = types.ModuleType("kit")
package.__path__ = [sys.argv[1]]
obtain = importlib.import_module("kit.engine.compile_process.obtain")
obtain.load(obtain.Code.unpacked(open(sys.argv[2], "rb").read()))
"""


class Rows(nn.Module):
    """So many rows, of such length, that PyTorch would compile the kernel anew for fewer registers."""

    def forward(self, x, weight, scale):
        return nn.functional.softmax(x, -1) * weight.sum() + scale.sum()


class TestOnAnH100:
    def test_kernels_are_for_the_card_that_was_described(self, engine, of_h100, monkeypatch):
        check_kernels(engine, of_h100, monkeypatch, 90)

    def test_a_graph_with_functions_of_the_hosts_kernels_comes_back(self, engine, of_h100):
        """Scaled fp8: PyTorch by itself serialises no graph that makes a tensor of comfy-kitchen's."""
        tensors = pytest.importorskip("comfy_kitchen.tensor")
        layout = "TensorCoreFP8Layout"
        request = request_of(engine, {}, Quantised(layout, tensors), ((256, 256), torch.float8_e4m3fn), ((), torch.float32))
        assert "comfy_kitchen.tensor.fp8" in request.text
        artefact = of_h100.lower(request.text, measures=request.measures).artefact
        assert b"\x7fELF" in artefact and b"scaled_mm" in artefact
        assert not of_h100._running.sees_cards

    @pytest.fixture(scope="class")
    @classmethod
    def artefact(cls, engine, of_h100, tmp_path_factory):
        """A file of code that was made without the card."""
        options, weights = engine("settings").CompileSettings().inductor_options(), ((256, 256), (256,))
        weights = [(shape, torch.bfloat16) for shape in weights]
        request = request_of(engine, options, Rows(), *weights, shape=(8, 4096, 40000))
        file = tmp_path_factory.mktemp("artefact") / "artefact"
        file.write_bytes(of_h100.lower(request.text, measures=request.measures).packed({}))
        return file

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's stand-in is for machines without one")
    @pytest.mark.parametrize("lacks", ["a compiler", "Triton"])
    def test_code_is_loaded_without_a_compiler_but_not_without_triton(self, artefact, tmp_path, lacks):
        (tmp_path / "packages").mkdir()
        if lacks == "Triton":
            (tmp_path / "packages" / "triton.py").write_text("raise ImportError('no triton here')")
        paths = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "packages"), "CC": "", "HOME": str(tmp_path)}
        command = [sys.executable, "-c", LOADS, str(ROOT), str(artefact)]
        done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True)
        if lacks == "Triton":
            assert "no triton here" in done.stderr.splitlines()[-1]
        else:
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lacks", ["Triton", "what a setting asks a card for"])
def test_what_fails_without_the_cards_is_tried_with_them(engine, process, monkeypatch, tmp_path, lacks):
    """Then the user reads what that says: here that there is no card. A process that does not start would say nothing."""
    compile_process, cards = process
    cards.append(H100)
    monkeypatch.setattr(engine("torch_compat.attention"), "kernel_for", lambda _node, _enabled: "flash_attention")
    request = request_of(engine, engine("settings").CompileSettings().inductor_options())
    if lacks == "Triton":
        (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        monkeypatch.setenv("TORCHINDUCTOR_BENCHMARK_FUSION", "1")
    compile_process.start()
    assert not compile_process._running.sees_cards
    failed = engine("compile_process.client").LoweringFailed
    with pytest.raises(failed):
        compile_process.lower(request.text, measures=request.measures)
    assert compile_process._running.sees_cards


def test_a_second_try_that_does_not_start_hides_no_failure(engine, process, monkeypatch):
    compile_process, _cards = process
    client, asked = engine("compile_process.client"), []

    def ask(_request, _patient, measures):
        asked.append(measures)
        raise client.NotStarted("no room") if measures else client.LoweringFailed("it is wrong", "mend it", False)

    monkeypatch.setattr(compile_process, "_ask", ask)
    monkeypatch.setattr(compile_process, "_running", types.SimpleNamespace(sees_cards=False))
    with pytest.raises(client.LoweringFailed, match="it is wrong"):
        compile_process.lower("", patient=True)
    assert asked == [False, True]
    monkeypatch.setattr(compile_process, "_running", None)


def test_before_it_is_asked_it_has_lowered_a_graph(process):
    """Else the first one takes longer, by what PyTorch imports and makes with it."""
    compile_process, cards = process
    cards.append(H100)
    compile_process.start()
    assert wait_until(lambda: any(compile_process.scratch.rglob("*.cubin")), "a kernel is there")


def test_a_mode_that_tunes_kernels_is_shown_the_cards(engine, process):
    compile_process, cards = process
    cards.append(H100)
    tuned = request_of(engine, engine("settings").CompileSettings(mode="max-autotune").inductor_options())
    assert tuned.measures
    compile_process.start()
    before = compile_process.pid
    assert not compile_process._running.sees_cards
    running = compile_process._ensure(tuned.measures)
    assert running.sees_cards and compile_process.pid != before
    assert compile_process._ensure() is running
