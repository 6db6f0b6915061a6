"""UNets that are replayed from CUDA graphs run their convolutions channels_last; here plain PyTorch stands in for Triton.

The kernels themselves are run by Triton's interpreter; tests/test_gpu.py runs them on a GPU.
"""

import json
import subprocess
import sys

import pytest
import torch
import zoo
from capturing import trust
from paging import paged
from reference_kernels import Reference
from support import TESTS, Block, CompiledNet, Net, compile_settings, eager_blocks, relative_error
from torch import nn
from torch.nn import functional

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
# SD 1.5's blocks run in parts, SDXL's whole.
UNETS = ["sd15", "sdxl", *(pytest.param(n, marks=pytest.mark.rest) for n in ("sdxl_refiner", "svd_img2vid"))]


@pytest.fixture
def reference(engine, monkeypatch):
    """Graphs are on, calls run again instead of being captured, and fp32 counts as a dtype for tensor cores."""
    reference = Reference()
    trust(engine, monkeypatch, "test_channels_last.py", "reference_kernels.py", "paging.py")
    graphing, graphs = engine("host.graphs.replay"), engine("cuda_graphs.capture")
    for module in (graphing, engine("channels_last.function_mode")):
        monkeypatch.setattr(module, "kernels", lambda: reference)
    monkeypatch.setattr(engine("channels_last.function_mode"), "DTYPES", {torch.float32})
    monkeypatch.setattr(engine("host.graphs.policy"), "no_graphs", lambda _device: None)
    monkeypatch.setattr(graphs.ModelGraphs, "_capture", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return reference


def attached(engine, patcher):
    settings = compile_settings(engine, mode="reduce-overhead", compile_when="before first image")
    return engine("host.model.attach").attach(patcher, settings)


def run(patcher, setup, steps=2):
    import comfy.sample

    latent = setup.latent()
    noise = comfy.sample.prepare_noise(latent, 1)
    positive, negative = setup.conds()
    return comfy.sample.sample(
        patcher, noise, steps, 4.0, "euler", "simple", positive, negative, latent, seed=1, disable_pbar=True
    )


@pytest.fixture
def both(engine, reference, monkeypatch):
    """A function: the set-up's latents of eager and of ours, and ours."""
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", True)

    def sampled(setup):
        patcher = setup.patcher()
        with torch.backends.mkldnn.flags(enabled=False):  # which chooses by layout, with a guard for each choice
            expected = run(patcher, setup)
            compiled = attached(engine, patcher)
            return expected, run(compiled, setup), compiled

    return sampled


@pytest.mark.parametrize("name", UNETS)
def test_a_unet_gives_the_same(name, engine, reference, both):
    expected, result, compiled = both(zoo.SETUPS[name])
    code = engine("compile.registry").code_of(compiled.model.diffusion_model)
    assert eager_blocks(code) and reference.norms > 8 and reference.weights > 8
    assert 0 < reference.with_silu <= reference.norms
    assert relative_error(result, expected) < 5e-5  # sums in another order: 1.02e-5 was seen
    assert not any("layout" in note for note in engine("host.model.attach").notes_about(compiled))
    guards = [guard for group in code.groups.values() for guard in group.stats.recompiles]
    assert not any("stride" in guard for guard in guards), guards


def test_a_unet_that_another_node_had_patched_when_it_was_looked_at_has_convolutions_later(tiny, engine, monkeypatch):
    network, has_convolutions = tiny.build_patcher("sdxl").model.diffusion_model, engine("host.graphs.replay").has_convolutions
    with monkeypatch.context() as patch:
        patch.setattr(type(network), "named_children", None)
        assert not has_convolutions(network)
    assert has_convolutions(network)


def test_parts_of_a_block_find_its_weights_in_place(engine, reference, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine("settings").CompileSettings, "wants_graphs", True)
        setup = zoo.SETUPS["sd15"]
        patcher = setup.patcher()
        with torch.backends.mkldnn.flags(enabled=False):
            expected = run(patcher, setup)
            with paged(patch, patcher.model) as pages:
                pages.resident = set(pages.layers)
                assert relative_error(run(attached(engine, patcher), setup), expected) < 1e-5
                assert any("transformer_blocks" in name for name in pages.memory) and pages.pinned == 0
    code = engine("compile.registry").code_of(patcher.model.diffusion_model)
    assert set(code.parts) == {"BasicTransformerBlock"} and {k.class_name for k in code.groups.values()} == set(code.parts)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_what_is_fetched_ahead_is_waited_for(name, engine, reference, monkeypatch):
    """Also for blocks that run eager: the host's layers take weights on their way as arrived (comfy/ops.py, `_prefetch`)."""
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", True)
    group, running, log = engine("host.weights.blocks").BlockWeights, [], []
    place, release, fetch = group.place, group.release, group.fetch

    def placing(self):
        running.append(self)
        log.append(("place", id(self)))
        place(self)

    def releasing(self):
        assert running.pop() is self
        release(self)

    def fetching(self):
        log.append(("fetch", id(self)))
        fetch(self)

    for method, function in (("place", placing), ("release", releasing), ("fetch", fetching)):
        monkeypatch.setattr(group, method, function)
    patcher = zoo.SETUPS[name].patcher()
    with torch.backends.mkldnn.flags(enabled=False), paged(monkeypatch, patcher.model) as pages:
        pages.resident = set(pages.layers)
        run(attached(engine, patcher), zoo.SETUPS[name])
    code = engine("compile.registry").code_of(patcher.model.diffusion_model)
    assert "ResBlock" in eager_blocks(code)["CONVOLUTIONS"] and not running
    placed = {group for event, group in log if event == "place"}
    assert placed and {group for event, group in log if event == "fetch"} == placed
    ahead = [index for index, (event, group) in enumerate(log) if event == "fetch" and log[index - 1] != ("place", group)]
    assert ahead and all(("place", log[index][1]) in log[index:] for index in ahead)


def test_blocks_get_their_images_as_they_are(engine, reference, both, monkeypatch):
    """SD 1.5's transformers take images where they are compiled whole: none is turned on its way to one, but the first."""
    turned, given = engine("compile.group").in_usual_layout, []
    monkeypatch.setattr(engine("blocks.convolutions"), "parts_of", lambda _block: [])

    def watched(args):
        found = turned(args)
        given.append(sum(image.dim() == 4 for image, _copy in found[1]))
        return found

    monkeypatch.setattr(engine("compile.group"), "in_usual_layout", watched)
    both(zoo.SETUPS["sd15"])
    assert len(given) > 8 and sum(given) <= 2, given


def test_a_model_that_cannot_work_so_runs_as_ever_and_it_is_said(engine, reference, both, monkeypatch):
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    found = ResBlock._forward

    def views(self, x, emb):
        return found(self, x.view(x.shape[0], -1).view(x.shape), emb)  # what only one layout allows

    monkeypatch.setattr(ResBlock, "_forward", views)
    expected, result, compiled = both(zoo.SETUPS["sdxl"])
    assert relative_error(result, expected) < 1e-5 and reference.norms < 20
    assert any("layout" in note and "view" in note for note in engine("host.model.attach").notes_about(compiled))


class UsedTwice(nn.Module):
    def forward(self, x):
        return functional.silu(x) + x


def layers(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), *more).requires_grad_(False)


@pytest.mark.parametrize(
    ("net", "with_silu"),
    [
        (layers(nn.SiLU(), nn.Conv2d(16, 8, 3, stride=2)), 1),
        (layers(nn.Sigmoid(), nn.Conv2d(16, 8, 1)), 0),
        (layers(nn.Flatten(2)), 0),
        (layers(), 0),
        (layers(UsedTwice()), 1),
        (layers(nn.SiLU(inplace=True), nn.Conv2d(16, 8, 1)), 0),
        (layers(nn.SiLU(), nn.GroupNorm(4, 16), nn.GroupNorm(2, 16), nn.SiLU(), nn.Upsample(scale_factor=2)), 2),
    ],
)
def test_layers_in_any_order(engine, reference, net, with_silu):
    mode = engine("channels_last.function_mode")
    x = torch.randn(2, 8, 12, 10)
    before = {name: (p.data_ptr(), p.stride()) for name, p in net.named_parameters()}
    result = mode.run_channels_last(net, (x,), {})
    expected = net(x)
    assert relative_error(result, expected) < 1e-5 and result.stride() == expected.stride()
    assert reference.with_silu == with_silu and mode._active() is None
    assert before == {name: (p.data_ptr(), p.stride()) for name, p in net.named_parameters()}


def test_a_norm_that_only_a_silu_reads_is_not_written(engine, reference):
    net = layers(nn.SiLU(), nn.Conv2d(16, 8, 1))
    engine("channels_last.function_mode").run_channels_last(net, (torch.randn(2, 8, 12, 10),), {})
    assert (reference.norms, reference.writes, reference.with_silu) == (1, 1, 1)


def test_what_a_failed_call_has_taken_is_there_for_the_next(engine, reference, monkeypatch):
    """As the host takes a ControlNet's tensors out of their lists (openaimodel.py, `apply_control`)."""
    graphing, network = engine("host.graphs.replay"), nn.Conv2d(8, 8, 3)
    monkeypatch.setattr(reference, "channels_last_weight", lambda _weight: [][0])  # no RuntimeError, as Triton's are not

    def forward(x, control, transformer_options):
        transformer_options["calls"] = transformer_options.get("calls", 0) + 1
        return network(x + control["output"].pop())

    x, hint, options = torch.randn(1, 8, 6, 6), torch.randn(1, 8, 6, 6), {}
    result = graphing._with_fast_convolutions(network, forward, x, control={"output": [hint]}, transformer_options=options)
    assert torch.equal(result, network(x + hint)) and options == {"calls": 2}
    (note,) = graphing.graphs_summary(network)
    assert "IndexError" in note and not graphing.runs_channels_last(network)


def test_it_ends_with_an_error(engine, reference):
    mode = engine("channels_last.function_mode")

    def fails(x):
        functional.group_norm(x, 2, torch.ones(8), torch.zeros(8))
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"):
        mode.run_channels_last(fails, (torch.randn(1, 8, 4, 4),), {})
    functional.group_norm(torch.randn(1, 8, 4, 4), 2)
    assert mode._active() is None and reference.norms == 1


def test_it_ends_when_its_own_kernel_fails(engine, reference, monkeypatch):
    mode = engine("channels_last.function_mode")
    monkeypatch.setattr(reference, "apply_factors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mode.run_channels_last(nn.GroupNorm(2, 8), (torch.randn(1, 8, 4, 4),), {})
    assert mode._active() is None and torch._C._len_torch_function_stack() == 0


def test_arguments_by_name(engine, reference):
    weight = torch.randn(4, 8, 3, 3)

    def named(x):
        return functional.conv2d(input=functional.group_norm(input=x, num_groups=2), weight=weight)

    x = torch.randn(1, 8, 6, 6)
    assert relative_error(engine("channels_last.function_mode").run_channels_last(named, (x,), {}), named(x)) < 1e-5


def test_a_block_that_works_in_place_does_so_on_the_callers_image(engine, reference):
    x = torch.randn(1, 8, 4, 4)
    in_usual_layout = engine("compile.call_shapes").in_usual_layout
    assert in_usual_layout((x, 3)) == ((x, 3), [])
    with engine("channels_last.function_mode").ChannelsLast():
        (turned, number), copies = in_usual_layout((x, 3))
    turned.zero_()
    for image, copy in copies:
        image.copy_(copy)
    assert number == 3 and turned.is_contiguous(memory_format=torch.channels_last) and copies and not x.any()


class Guided(Block):
    def forward(self, x, image):
        return super().forward(x) * image.mean((1, 2, 3))[:, None, None]


class GuidedNet(Net):
    def forward(self, x, image):
        for block in self.blocks:
            x = block(x, image)
        return x


@pytest.mark.parametrize("compile_when", ["in background", "at once"])
def test_an_expanded_image_is_not_written_to(engine, reference, compile_when):
    """PyTorch refuses to write to a tensor whose elements share memory."""
    net, x = GuidedNet(Guided), torch.randn(2, 4, 8)
    step, image = CompiledNet(engine, net), torch.randn(1, 8, 4, 4).expand(2, -1, -1, -1)
    expected, before = net(x, image), image.clone()
    for _ in range(2):
        with engine("channels_last.function_mode").ChannelsLast():
            result = step.at_once(x, image) if compile_when == "at once" else step(x, image)[0]
        step.wait()
        assert torch.allclose(result, expected, atol=1e-6) and torch.equal(image, before)
    assert step.graphs == 1 and not step.failures


def test_compiled_code_does_not_see_it(engine, reference):
    mode, seen = engine("channels_last.function_mode"), []

    def block(x):
        with mode.paused():
            seen.append((mode._active() is not None, torch._C._len_torch_function_stack()))
        return functional.group_norm(x, 2, torch.ones(8), torch.zeros(8))

    mode.run_channels_last(block, (torch.randn(1, 8, 4, 4),), {})
    assert seen == [(False, 0)] and reference.norms == 1


@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 8, 6), torch.randn(2, 8, 6, 6, dtype=torch.float64), torch.randn(2, 8, 1, 6), torch.randn(2, 8, 2, 2, 2)],
)
def test_what_is_no_image_for_tensor_cores_stays(engine, reference, x):
    engine("channels_last.function_mode").run_channels_last(nn.GroupNorm(2, 8, dtype=x.dtype), (x,), {})
    assert not reference.norms


def test_the_kernels_themselves():
    """In Triton's interpreter: odd sizes, odd groups, a mean far from zero; layers that no tile divides."""
    script = TESTS / "interpreted_kernels.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    norms, weights = ([row for row in rows if kind in row] for kind in ("shape", "weight"))
    assert len(norms) == 12 and len(weights) == 4
    assert all(row["norm"] < 5e-4 and row["silu"] < 1e-3 for row in norms), norms  # fp16 has eleven bits
    assert all(row["same"] for row in weights), weights


def test_the_kernels_are_found_where_triton_is(engine):
    pytest.importorskip("triton")
    assert hasattr(engine("channels_last.preparing").kernels(), "factors_of")
