"""What only a CUDA device can show: `pytest -m gpu`. Elsewhere these tests are not collected (conftest.py)."""

import os
import subprocess
import sys

import pytest
import torch
from patch_kinds.weights import load_partly, quantised
from patching import Runs
from support import ROOT, TESTS, Net, relative_error
from torch import nn
from torch.nn import functional

pytestmark = [pytest.mark.gpu, pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

MIB = 2**20


@pytest.fixture(autouse=True)
def compiles_at_once_worth_while(engine, monkeypatch):
    """Steps of tiny models take no time, so compiling them would be put off."""
    monkeypatch.setattr(engine("host.model.payback"), "counts_runs_on", lambda _device: False)
    monkeypatch.setattr(engine("host.model.network_calls"), "imports_beside_calls", lambda _device: False)


# A copy is held up by some tenth of a second of nothing on its stream.
_CYCLES = 200_000_000


def device_at(index):
    if index >= torch.cuda.device_count():
        pytest.skip(f"this machine has no cuda:{index}")
    return torch.device("cuda", index)


@pytest.fixture(params=[0, 1], ids=["cuda:0", "cuda:1"])
def device(request):
    return device_at(request.param)


def in_a_process_with_cudamallocasync(*command, says):
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip().endswith(says), done.stderr[-2000:]
    assert "uncaptured free" not in done.stderr


class TestGraphs:
    """Captured and replayed for real, the current device being the first one, as in the host's main thread."""

    def calls(self, engine, device, graphs=None):
        graphs = graphs or engine("cuda_graphs.capture").ModelGraphs()
        model = Net(count=2, width=64).to(device)
        graphs.drop_if_stale(model, device)
        for step in range(4):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(step)).to(device)
            result = graphs.call("key", model, (x,), {}, {})
            assert relative_error(result, model(x)) < 1e-5, f"call {step}: a replay gives what an earlier call gave"
        return graphs

    def test_each_replay_computes_from_its_own_input(self, engine, device):
        graphs = self.calls(engine, device)
        assert (graphs.captures, graphs.replays, graphs.failures) == (1, 2, {})

    def test_two_devices_in_turn(self, engine):
        """PyTorch's own capture stream belongs to whichever device comes first."""
        device_at(1)
        for index in (0, 1, 0):
            assert self.calls(engine, torch.device("cuda", index)).captures == 1

    def test_a_capture_that_fails_ends_nothing(self):
        """With ComfyUI's default allocator giving back memory of such a capture ended the process."""
        code = """
import torch
from engine.cuda_graphs.capture import ModelGraphs

def model(x, kept=[]):
    y = torch.sin(x)
    kept.append(y * 2)
    if torch.cuda.is_current_stream_capturing() and len(kept) < 4:
        raise ValueError("not like this")
    return y + 1

graphs = ModelGraphs()
graphs.drop_if_stale(torch.nn.Linear(2, 2).cuda(), torch.device("cuda", 0))
x = torch.randn(1000, 1000, device="cuda:0")
for _ in range(4):
    assert torch.equal(graphs.call("key", model, (x,), {}, {}), torch.sin(x) + 1)
assert graphs.failures == {"key": "ValueError: not like this"} and graphs.captures == 0
model.__defaults__[0].clear()
graphs.failures.clear()
model.__defaults__[0].extend(range(4))
for _ in range(3):
    assert torch.equal(graphs.call("key", model, (x,), {}, {}), torch.sin(x) + 1)
# It keeps a tensor of the capture, so that graph is for one call; what is kept may be read, and freed.
assert graphs.captures == 1 and graphs.replays == 0, (graphs.captures, graphs.replays)
assert torch.equal(model.__defaults__[0][4], torch.sin(x) * 2)
graphs.drop()
model.__defaults__[0].clear()
torch.cuda.synchronize()
print("lives")
"""
        in_a_process_with_cudamallocasync("-c", code, says="lives")

    def test_graphs_after_a_capture_that_failed_are_right(self):
        """PyTorch kept cuBLASLt's workspace, from that capture, at an address that later graphs got for other things."""
        code = """
import torch
from engine.cuda_graphs.capture import ModelGraphs

def model(x, fails=False):
    for weight in weights:
        x = torch.nn.functional.linear(x, weight * 1, bias)
    if fails and torch.cuda.is_current_stream_capturing():
        torch.tensor([0, 4], device=x.device)
    return x

device = torch.device("cuda", 0)
weights = [torch.randn(1024, 1024, device=device).bfloat16() * 0.03 for _ in range(8)]
bias, graphs = torch.randn(1024, device=device).bfloat16(), ModelGraphs()
graphs.drop_if_stale(torch.nn.Linear(2, 2).cuda(), device)
for size in range(256, 2048, 256):
    x = torch.randn(size, 1024, device=device).bfloat16()
    expected = model(x)
    for fails in (True, False):
        for _ in range(3):
            assert torch.equal(graphs.call((size, fails), model, (x,), {}, {"fails": fails}), expected)
assert not graphs.differences and graphs.captures == 7, (graphs.captures, graphs.failures)
print("right")
"""
        in_a_process_with_cudamallocasync("-c", code, says="right")

    def test_captures_from_memory_of_cudamallocasync(self, engine):
        version = ".".join(torch.__version__.split(".")[:2])
        if version not in engine("torch_compat.private").CAPTURES_ASYNC:
            pytest.skip(f"not known to work with PyTorch {version}: there are no such graphs there")
        in_a_process_with_cudamallocasync(TESTS / "captures_async.py", says="capture and replay work")

    def test_memory_of_dropped_graphs_is_free_again(self):
        code = """
import torch
from engine.cuda_graphs.capture import ModelGraphs

GIB, device = 2**30, torch.device("cuda", 0)

def model(x):
    return x + torch.zeros(2 * GIB, dtype=torch.uint8, device=device)[:1000].float()

def free():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]

graphs, x = ModelGraphs(), torch.ones(1000, device=device)
graphs.drop_if_stale(torch.nn.Linear(2, 2).cuda(), device)
graphs.call("key", model, (x,), {}, {})
before = free()
for generation in range(2):
    for _ in range(3):
        graphs.call("key", model, (x,), {}, {}, code=lambda: generation)
    assert before - free() >= 2 * GIB, "captured"
graphs.drop()
assert before - free() < GIB // 4, "dropped"
print("free")
"""
        in_a_process_with_cudamallocasync("-c", code, says="free")

    def test_a_sampled_model(self, engine, tiny, device):
        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
        runs.patcher = tiny.build_patcher("flux", device)
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher, backend="cudagraphs")
        for _ in range(3):  # one call may have measured attention, one was captured, and one before
            assert relative_error(runs.run(compiled), expected) < 1e-3
        graphs = engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model)
        notes = engine("host.model.attach").notes_about(compiled)
        assert graphs.captures == 1 and graphs.replays >= 9, notes

    def test_a_sampled_model_under_other_settings(self, engine, tiny):
        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
        expected = runs.run(runs.patcher)
        graphs = engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model)
        for count, blocks in enumerate(("*", "double_blocks.*"), 1):
            compiled = runs.attach(runs.patcher, mode="reduce-overhead", backend="inductor", only_blocks=blocks)
            for _ in range(2):
                assert relative_error(runs.run(compiled), expected) < 2e-3
            assert graphs.captures >= count and graphs.replays > 0

    def test_a_value_that_a_node_patches_after_the_capture(self, engine, tiny):
        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
        plain, compiled, results = runs.patcher, runs.attach(runs.patcher, mode="reduce-overhead", backend="inductor"), []
        for theta in (10_000, 2):
            patched = [patcher.clone() for patcher in (plain, compiled)]
            for patcher in patched:
                patcher.add_object_patch("diffusion_model.pe_embedder.theta", theta)
            results.append(runs.run(patched[0]))
            for _ in range(2):
                assert relative_error(runs.run(patched[1]), results[-1]) < 2e-3
        assert relative_error(*results) > 1e-2
        assert engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model).replays > 0

    def test_a_model_that_waits_for_the_gpu_is_not_captured(self, engine, device):
        """A boolean mask (HiDream's experts, LTXV's keyframes) asks the GPU how many there are; the next model is captured."""
        module, x = engine("cuda_graphs.capture"), torch.randn(3, 64, device=device)
        for model, captures in ((lambda x: x + x[x > 0].sum(), 0), (lambda x: x * 2, 1)):
            graphs, stream = module.ModelGraphs(), torch.cuda.current_stream()
            graphs.drop_if_stale(torch.nn.Linear(2, 2).to(device), device)
            for _ in range(4):
                assert relative_error(graphs.call("key", model, (x,), {}, {}), model(x)) < 1e-5
            assert (graphs.captures, torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (captures, stream, 0)
            torch.cuda.empty_cache()

    @pytest.mark.parametrize("when", [1, 3])
    def test_out_of_memory_when_a_graph_is_launched(self, engine, device, monkeypatch, when):
        graphs, model = engine("cuda_graphs.capture").ModelGraphs(), Net(count=2, width=64).to(device)
        graphs.drop_if_stale(model, device)
        replay = torch.cuda.CUDAGraph.replay

        def no_room(graph):
            raise torch.OutOfMemoryError("no room")

        for step in range(6):
            x = torch.randn(3, 64, device=device)
            monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", no_room if step == when else replay)
            assert relative_error(graphs.call("key", model, (x,), {}, {}), model(x)) < 1e-5
        assert graphs.captures == 1 and not graphs.graphs and "no room" in graphs.failures["key"]

    def test_an_unloaded_model_leaves_no_graph(self, engine, tiny):
        import comfy.model_management

        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
        compiled = runs.attach(runs.patcher, mode="reduce-overhead", backend="inductor")
        runs.run(compiled)
        graphs = engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model)
        runs.run(runs.patcher)  # the node is bypassed
        assert graphs.graphs
        comfy.model_management.unload_all_models()
        assert not graphs.graphs

    def test_a_number_on_the_cpu_is_no_constant(self, engine):
        graphs = engine("cuda_graphs.capture").ModelGraphs()
        graphs.model.device = torch.device("cuda", 0)
        x = torch.ones(4, device="cuda:0")
        for step in range(4):
            result = graphs.call("key", lambda x, factor: x * factor, (x, torch.tensor(float(step))), {}, {})
            assert result[0].item() == step
        assert graphs.captures == 0


class Weights(nn.Module):
    """A block of `size` bytes in pinned memory."""

    def __init__(self, size, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value, dtype=torch.uint8).pin_memory(), requires_grad=False)


class TestStreaming:
    """Buffers of streamed weights under cancel: copies are held up, so that they are under way when a buffer is given up."""

    @pytest.fixture
    def streaming(self, engine):
        module = engine("host.weights.partial_load")
        module.release_buffers()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        yield module
        module.release_buffers()

    @pytest.fixture
    def fetch(self, streaming):
        """A function: fetch a block of so many bytes; returns it and what streams it."""

        def fetch(size, value=1):
            block, device = Weights(size, value), torch.device("cuda", 0)
            streamed = streaming.StreamedTensors(streaming.tensors_elsewhere(block, device), device, torch.float32)
            streamed.fetch()
            return block, streamed

        return fetch

    @staticmethod
    def hold_up(streaming):
        with torch.cuda.stream(streaming._slots_on(torch.device("cuda", 0))._slots[0]._stream):
            torch.cuda._sleep(_CYCLES)

    @staticmethod
    def untouched(size):
        """Whether new tensors, one of which gets the buffer's old memory, keep what is written to them."""
        tensors = [torch.full((size,), 7, dtype=torch.uint8, device="cuda:0") for _ in range(3)]
        torch.cuda.synchronize()
        return all(bool((t == 7).all()) for t in tensors)

    def test_cancelled_between_fetch_and_use(self, streaming, fetch):
        self.hold_up(streaming)
        _block, streamed = fetch(8 * MIB)
        streamed.drop()
        streaming.release_buffers()
        del streamed
        assert self.untouched(8 * MIB)

    def test_growth_over_a_copy_that_nobody_waits_for(self, streaming, fetch):
        self.hold_up(streaming)
        kept = [fetch(8 * MIB), fetch(8 * MIB), fetch(24 * MIB, value=3)]  # two buffers: the third is the first, grown
        assert self.untouched(8 * MIB)
        ((_, placed),) = kept[2][1].resolve()
        assert bool((placed["weight"] == 3).all())
        for _block, streamed in kept:
            streamed.drop()

    def test_two_models_in_turn(self, streaming, fetch):
        _, first = fetch(4 * MIB, value=1)
        self.hold_up(streaming)
        _, second = fetch(4 * MIB, value=2)
        streaming.release_buffers()  # the first model's run ends
        _, third = fetch(4 * MIB, value=3)
        for streamed, value in ((first, 1), (second, 2), (third, 3)):
            ((_, placed),) = streamed.resolve()
            assert bool((placed["weight"] == value).all())
            streamed.drop()

    def test_a_cancelled_run_and_the_next(self, engine, tiny):
        import comfy.model_management

        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=3)
        load_partly(runs.patcher, 0.2)
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher)
        block, calls = runs.patcher.model.diffusion_model.single_blocks[1], []

        def cancel(*_):
            calls.append(1)
            if len(calls) == 2:
                raise comfy.model_management.InterruptProcessingException

        for _ in range(3):
            handle = block.register_forward_pre_hook(cancel)
            with pytest.raises(comfy.model_management.InterruptProcessingException):
                runs.run(compiled)
            handle.remove()
            calls.clear()
            assert relative_error(runs.run(compiled), expected) < 1e-3
            assert engine("background.thread").compiler.wait(300)  # attention's kernels are made ready, or code is made
        notes = engine("host.weights.blocks").notes_on(runs.patcher.model)
        assert any("put in place" in note for note in notes), "nothing was streamed; this proves nothing"


class TestInTheBackground:
    """The default mode: traced in the call, lowered by the worker, run from then on."""

    @pytest.mark.parametrize("name", ["flux", "sdxl", "wan"])
    def test_images_are_right_before_and_after_the_code_is_there(self, tiny, engine, name):
        runs = Runs(tiny, engine, name, steps=4)
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher, backend="inductor", compile_when="in background")
        compiler, code = engine("background.thread").compiler, engine("compile.registry").code_of
        for _ in range(3):  # in the first one of a process attention's kernels may be made ready
            assert relative_error(runs.run(compiled), expected) < 2e-3
            assert compiler.wait(300)
        before = code(runs.patcher.model.diffusion_model).eager_calls
        assert before > 0
        for _ in range(2):
            assert relative_error(runs.run(compiled), expected) < 2e-3
        assert code(runs.patcher.model.diffusion_model).eager_calls == before
        assert runs.graphs and not runs.failures

    @pytest.mark.parametrize("format_name", ["int8_tensorwise", "float8_e4m3fn", "nvfp4", "convrot_w4a4", "asym_w4a8_int8"])
    def test_quantised_weights(self, tiny, engine, format_name):
        import comfy.quant_ops
        import comfy.sd

        if format_name not in comfy.quant_ops.QUANT_ALGOS:
            pytest.skip(f"this ComfyUI has no {format_name}")
        runs = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
        runs.patcher = comfy.sd.load_diffusion_model_state_dict(
            quantised(runs.patcher.model.diffusion_model.state_dict(), format_name)
        )
        expected = runs.run(runs.patcher)
        compiled = runs.attach(runs.patcher, backend="inductor", compile_when="in background")
        engine("compile_process.obtain").import_ahead().join()  # else the first calls wait for that
        for _ in range(2):  # in the first one of a process attention's kernels may be made ready
            runs.run(compiled)
            assert engine("background.thread").compiler.wait(300)
        code = engine("compile.registry").code_of(runs.patcher.model.diffusion_model)
        before = code.eager_calls
        for _ in range(3):
            assert relative_error(runs.run(compiled), expected) < 3e-2
        assert code.eager_calls == before and not runs.failures and sum(g.stats.graph_breaks for g in runs.groups) == 0
        assert [group.code.why_inline for group in runs.groups if group.code.why_inline is not None] == []


class TestAttention:
    def test_the_chosen_kernel_gives_what_the_host_does(self, engine):
        attention = engine("attention_kernels")

        def attention_pytorch(q, k, v, heads, mask=None, *_args, **_kwargs):
            q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

        survey = attention.AttentionSurvey("auto")
        q, k, v = torch.randn(3, 1, 1024, 8 * 64, device="cuda", dtype=torch.half)
        expected = survey(attention_pytorch, q, k, v, 8)
        chosen = survey.best()
        assert survey.complete and survey.calls.total() == 1
        assert chosen == "comfyui" or attention.override_for(chosen) is not None
        for name in attention.KERNELS:
            assert relative_error(attention.override_for(name)(attention_pytorch, q, k, v, 8), expected) < 5e-3, name
            attention.AttentionSurvey(name)(attention_pytorch, q, k, v, 8)
        (call,) = survey.calls
        assert all(0 < attention._measure(name, call) < 1 for name in attention.KERNELS)

    @pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
    def test_a_batch_that_no_flash_kernel_can_launch(self, engine, kernel):
        """As temporal attention of SVD at 2048x1120 has it."""
        from comfy.ldm.modules.attention import attention_pytorch

        q = torch.randn(70_000, 2, 128, device="cuda", dtype=torch.half)
        result = engine("attention_kernels").override_for(kernel)(attention_pytorch, q, q, q, 2)
        assert relative_error(result, attention_pytorch(q, q, q, 2)) < 5e-3

    def test_what_a_kernel_cannot_run_is_not_measured_and_refused(self, engine):
        attention, q = engine("attention_kernels"), torch.randn(1, 8, 64, 64, device="cuda")  # float32
        spec = engine("tensor_spec").TensorSpec.of(q)
        assert attention._measure("flash", (spec, spec, spec, None, None)) == float("inf")
        assert 0 < attention._measure("efficient", (spec, spec, spec, None, None)) < 1
        with pytest.raises(engine("errors").InvalidSetting, match="cannot run it"):
            attention.AttentionSurvey("flash")._check(q, q, q, None)

    def test_a_measured_time_is_a_number(self, engine):
        x = torch.randn(512, 512, device="cuda", dtype=torch.half)
        seconds = engine("attention_kernels")._seconds_on_gpu(lambda: x @ x)
        assert seconds is not None and seconds > 0


NORMS = [(2, 64, 8, 8, 32), (1, 320, 7, 5, 32), (3, 48, 2, 2, 4), (1, 160, 9, 9, 1), (2, 30, 33, 3, 15), (2, 320, 64, 64, 32)]


class TestGroupNorm:
    """Our Triton kernels, compiled; `interpreted_kernels.py` has them in Triton's interpreter."""

    @pytest.mark.parametrize("images, channels, height, width, groups", NORMS)
    def test_beside_float64(self, engine, images, channels, height, width, groups):
        kernels = engine("channels_last.kernels")
        for offset in (0.0, 100.0):
            x = torch.randn(images, channels, height, width, device="cuda").add(offset).half()
            x = x.contiguous(memory_format=torch.channels_last)
            scale, shift = torch.randn(2, channels, device="cuda", dtype=torch.half)
            exact = functional.group_norm(x.double(), groups, scale.double(), shift.double())
            for silu, expected, bound in ((False, exact, 5e-4), (True, functional.silu(exact), 1e-3)):
                out = torch.full_like(x, torch.nan)
                kernels.apply_factors(x, kernels.factors_of(x, groups, scale, shift, 1e-5), out, silu)
                assert relative_error(out.double(), expected) < bound

    def test_what_was_compiled_for_images_on_the_cpu_runs_as_it_is(self, engine):
        """Other threads may capture meanwhile, which work on the GPU would break."""
        kernels, norms = engine("channels_last.kernels"), engine("channels_last.preparing")
        names = "_sum_channels", "_find_factors", "_apply_factors", "_turn_weight"
        caches = [getattr(kernels, name).device_caches[torch.cuda.current_device()][0] for name in names]
        for cache in caches:
            cache.clear()
        with kernels.only_compiling():
            norms._run_all(torch.device("cpu"))
        compiled = [set(cache) for cache in caches]
        norms._run_all(torch.device("cuda"))
        assert all(compiled) and [set(cache) for cache in caches] == compiled

    @pytest.mark.parametrize("shape", [(8, 4, 3, 3), (5, 130, 3, 3), (4, 1, 7, 7), (3, 200, 1, 3)])
    def test_weights_side_by_side(self, engine, shape):
        weight = torch.randn(*shape, device="cuda", dtype=torch.half)
        turned = engine("channels_last.kernels").channels_last_weight(weight)
        assert torch.equal(turned, weight) and turned.is_contiguous(memory_format=torch.channels_last)


class TestCompileProcess:
    """It lowers for a card that it does not see."""

    def masks(self, device):
        allowed = torch.rand(2, 1, 77, 130, device=device) > 0.3
        allowed[..., 0] = True
        return {"none": None, "bools": allowed, "numbers": torch.randn(2, 4, 77, 130, device=device, dtype=torch.bfloat16)}

    @pytest.mark.parametrize("mask", ["none", "bools", "numbers"])
    @pytest.mark.parametrize("width", [64, 60])
    @pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention", "math"])
    def test_attention_by_the_name_of_its_kernel_is_pytorchs(self, engine, kernel, width, mask):
        attention, device = engine("torch_compat.attention"), device_at(0)
        q, k, v = (torch.randn(2, 4, n, width, device=device, dtype=torch.bfloat16) for n in (77, 130, 130))
        given = {"attn_mask": self.masks(device)[mask], "scale": 0.1}
        backend = getattr(torch.nn.attention.SDPBackend, kernel.upper())
        with torch.nn.attention.sdpa_kernel([backend]):
            try:
                expected = functional.scaled_dot_product_attention(q, k, v, **given)
            except RuntimeError:
                pytest.skip(f"{kernel} cannot run this call")
        actual = attention.KERNELS[kernel](q, k, v, **given)
        assert torch.equal(actual, expected)
