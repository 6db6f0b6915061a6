"""CUDA graphs over paged weights: when a call may be replayed. Capturing itself needs a GPU (tests/test_gpu.py)."""

import functools

import pytest
import torch
from capturing import capture_again, trust
from compiled_runs import CompiledRuns
from paging import paged
from patching import Runs, graphs_of
from patching import shares_code as fresh_dynamo  # noqa: F401
from support import compile_settings, eager_blocks, relative_error
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def compiled(flux):
    """Compiled blocks take their weights from pages; the host's own layers do not on a CPU."""
    return flux.attach(flux.patcher)


def lacks_room(runs):
    return runs.engine("host.graphs.replay").state_of(runs.patcher.model.diffusion_model).lacks_room


@pytest.fixture
def pages(flux, monkeypatch):
    """The model's weights are in pages, all in memory; `flux.expected` is its image."""
    flux.expected = flux.run(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        yield pages


def check(flux, compiled, expected=None):
    """Run; how many calls were captured and how many replayed."""
    found = graphs_of(flux)
    before = found.captures, found.replays
    assert relative_error(flux.run(compiled), flux.expected if expected is None else expected) < 1e-6
    return found.captures - before[0], found.replays - before[1]


def test_weights_that_stay_in_their_pages(flux, compiled, pages):
    assert check(flux, compiled) == (1, 1)  # plain (which fetched the weights), captured, replayed
    assert check(flux, compiled) == (0, 3)
    assert pages.pinned == 0 and not lacks_room(flux)
    assert flux.graphs == 1, "tensors that were put elsewhere are not compiled for anew"


def test_a_replay_looks_at_no_block(flux, compiled, engine, monkeypatch):
    flux.run(compiled)
    graphs, asked = graphs_of(flux).graphs, []

    class Replay:
        def replay(self, tensors):
            return torch.zeros_like(tensors[0])

    for key in graphs:
        graphs[key] = Replay()
    monkeypatch.setattr(engine("compile.registry").ModelCode, "group_of", lambda *given: asked.append(given))
    assert not flux.run(compiled).isnan().any()
    assert graphs_of(flux).replays > 0 and not asked


def test_a_page_that_was_taken_away_is_fetched_by_a_plain_call(flux, compiled, pages):
    check(flux, compiled)
    del pages.memory[next(iter(pages.memory))]  # another model needed the room
    assert check(flux, compiled) == (0, 2)
    assert pages.pinned == 0 and graphs_of(flux).graphs


@pytest.mark.parametrize("kind", ["lora", "diff"])
def test_a_lora_that_the_host_sets_anew_for_each_prompt(flux, compiled, pages, kind):
    """ComfyUI makes a new object for each layer with a LoRA (comfy/model_patcher.py, `ModelPatcherDynamic.load`)."""
    import comfy.model_patcher
    from comfy.weight_adapter.lora import LoRAAdapter

    name, layer = next(iter(pages.layers.items()))
    rows, columns = layer.weight.shape
    zeros = torch.zeros(rows, 2), torch.zeros(2, columns), 1.0, None, None, None
    patch = LoRAAdapter(set(), zeros) if kind == "lora" else ("diff", (torch.zeros_like(layer.weight),))
    key = f"diffusion_model.{name}.weight"
    patches = {key: [(0.1, patch, 1.0, None, None)]}
    for prompt in range(2):
        layer.weight_lowvram_function = comfy.model_patcher.LowVramPatch(key, patches)
        layer.weight_lowvram_function._pin_state = layer._pin_state
        assert check(flux, compiled) == ((0, 3) if prompt else (1, 1))


def test_a_lora_that_belongs_in_the_pages_is_put_there_first(flux, compiled, pages):
    check(flux, compiled)
    layer = pages.layers[next(iter(pages.memory))]
    with torch.inference_mode():
        layer.weight.mul_(1.5)
    layer._v_signature = None  # as the host's loading marks what has changed
    changed = flux.run(flux.patcher)
    layer._v_signature = None
    assert check(flux, compiled, changed) == (0, 2)
    assert relative_error(changed, flux.expected) > 1e-3


def test_weights_that_do_not_all_fit_are_not_captured_and_it_is_said(flux, compiled, pages, engine):
    check(flux, compiled)
    pages.resident = set(list(pages.layers)[::2])
    assert check(flux, compiled) == (0, 0)
    assert lacks_room(flux) and not graphs_of(flux).graphs and pages.pinned == 0
    assert any("do not all fit" in note for note in engine("host.model.attach").notes_about(compiled))
    pages.resident = set(pages.layers)
    assert check(flux, compiled) == (1, 1)


def test_graphs_that_take_the_memory_of_weights_twice_are_left(flux, compiled, pages):
    """Else each prompt captures, loses weights for it and drops the graphs."""
    for _ in range(2):
        pages.resident = set(pages.layers)
        assert check(flux, compiled) == (1, 1)
        pages.resident = set(list(pages.layers)[::2])
        assert check(flux, compiled) == (0, 0)
    pages.resident = set(pages.layers)
    assert check(flux, compiled) == (0, 0) and lacks_room(flux)
    found = [check(flux, compiled) for _ in range(10)]
    assert sum(captured for captured, _replayed in found) == 1, "it is tried again later"


def test_nobody_takes_the_pages_of_a_graph_during_a_capture_or_a_replay(flux, compiled, pages, monkeypatch):
    """With pinned pages among them, dynamic VRAM would give back all. But with the limit it raises where there is no room."""
    end, held, asked = max(at + size for at, size in pages.places.values()), [], set()
    unpin, fault = pages.unpin, pages.fault
    monkeypatch.setattr(pages, "unpin", lambda allocation: held.append(pages.limits[-1]) or unpin(allocation))

    def noted(allocation):
        if len(pages.within(allocation)) > 1:  # ours
            asked.add(pages.limits[-1])
        return fault(allocation)

    monkeypatch.setattr(pages, "fault", noted)
    for _ in range(2):
        flux.run(compiled)
    assert {0, end} == set(pages.limits) and pages.limits[-1] == 0
    assert held[-3:] == [end] * 3, "each replay of the second run"
    assert asked == {0}


def test_a_driver_that_gives_no_memory_for_a_page_ends_no_prompt(flux, compiled, pages, monkeypatch):
    assert check(flux, compiled) == (1, 1)
    fault, refused = pages.fault, []

    def refuse(allocation):
        if len(pages.within(allocation)) > 1:  # the host's own faults are of one layer
            refused.append(allocation)
            raise RuntimeError("Fault failed: 2")
        return fault(allocation)

    monkeypatch.setattr(pages, "fault", refuse)
    assert check(flux, compiled) == (0, 0) and refused


def test_the_check_of_a_graph_is_made_in_one_of_ten_runs(flux, compiled, pages):
    checks = []
    for _ in range(22):
        flux.engine("host.model.attach")._on_load(compiled)  # as in each prompt under dynamic VRAM
        flux.run(compiled)
        checks.append(graphs_of(flux).checks)
    assert [n for n, (before, after) in enumerate(zip([0, *checks], checks, strict=False), 1) if after > before] == [1, 10, 20]


def test_weights_changed_on_the_way_are_not_captured(flux, compiled, engine):
    def half_as_much_more(patcher):
        clone = patcher.clone()
        clone.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight: weight * 1.5)
        return clone

    expected = flux.run(half_as_much_more(flux.patcher))
    assert check(flux, half_as_much_more(compiled), expected) == (0, 0)
    assert "CUDA graphs are off: test_replay.py is in this run." in engine("host.model.attach").notes_about(compiled)
    assert check(flux, compiled, flux.run(flux.patcher)) == (1, 1)


def test_weights_that_never_all_fit_are_never_captured(flux, compiled, pages):
    """Layers without a page look like layers that are not used."""
    names = list(pages.layers)
    pages.resident = set(names[: len(names) // 2])
    assert check(flux, compiled) == (0, 0)
    assert check(flux, compiled) == (0, 0)
    assert lacks_room(flux) and pages.pinned == 0


def test_a_layer_that_is_used_no_more_does_not_stand_in_the_way(flux, compiled, pages):
    check(flux, compiled)
    # Another input has made use of this one once; a LoRA has made the host want all weights anew since.
    unused = pages.layers["img_in"]
    unused._v_signature = "fetched"
    check(flux, compiled)
    for layer in pages.layers.values():
        layer._v_signature = None
    longer = Runs.run.__get__(flux)
    flux.steps = 8
    assert check(flux, compiled, longer(flux.patcher))[1] > 0 and not lacks_room(flux)


def test_pages_are_free_while_a_call_runs_plainly(flux, compiled, pages, engine, monkeypatch):
    """A larger image may need their room."""
    trust(engine, monkeypatch, "test_replay.py")
    check(flux, compiled)
    found, pinned = graphs_of(flux), []
    found.graphs.clear()
    found.seen.clear()
    layer = flux.patcher.model.diffusion_model.img_in  # outside the blocks, whose own pages are pinned while they run
    original = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: (pinned.append(pages.pinned), original(x))[1])
    assert relative_error(flux.run(compiled), flux.expected) < 1e-6
    assert pinned[0] == 0 and pinned[1] > 0  # plain, then captured


def test_a_call_that_fails_leaves_no_page_pinned(flux, compiled, pages):
    check(flux, compiled)
    block = flux.patcher.model.diffusion_model.single_blocks[2]

    def fails(*args, **kwargs):
        raise ValueError("stop")

    block.register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="stop"):
        flux.run(compiled)
    assert pages.pinned == 0


class TestWhatGraphsKnow:
    """`ModelGraphs.drop_if_stale` on a plain module: once a run, what a graph was captured with against what is there now."""

    @pytest.fixture
    def checked(self, engine):
        graphs = engine("cuda_graphs.capture").ModelGraphs()
        layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)

        def check(device="cpu", places=lambda module: None):
            graphs.model.new_run()
            graphs.drop_if_stale(layer, torch.device(device), places)
            return "graph" in graphs.graphs

        check()
        graphs.graphs["graph"] = None
        return graphs, layer, check

    def test_nothing_has_changed(self, checked):
        assert checked[2]()

    def test_a_small_tensor_made_anew_is_copied_to_where_the_graph_knows_it(self, checked):
        _, layer, check = checked
        known = layer[0].bias.data_ptr()
        original = torch.full((4,), 5.0)
        layer[0].bias = nn.Parameter(original, requires_grad=False)
        assert check() and layer[0].bias.data_ptr() == known and torch.equal(layer[0].bias, original)
        layer[0].bias = nn.Parameter(torch.zeros(4), requires_grad=False)
        assert check() and torch.equal(original, torch.full((4,), 5.0)), "the host may restore that one"

    def test_where_the_host_does_not_page_nothing_is_copied(self, checked):
        _, layer, check = checked
        made = nn.Parameter(torch.zeros(4), requires_grad=False)
        layer[0].bias = made
        assert not check(places=None) and layer[0].bias is made

    def test_a_layer_that_was_exchanged(self, checked):
        _, layer, check = checked
        layer[1] = nn.SiLU()
        assert not check()

    def test_code_of_another_pack(self, checked):
        graphs, layer, check = checked
        handle = layer[0].register_forward_hook(lambda *_: None)
        assert check() and graphs.model.foreign == "test_replay.py", "the graph is for a later run"
        handle.remove()
        assert check() and graphs.model.foreign is None

    def test_weights_that_are_not_where_the_model_computes(self, checked):
        graphs, _, check = checked
        check(device="cuda")
        assert "elsewhere" in graphs.model.obstacle


class OneBlock(nn.Module):
    """A model in which no class repeats: it is compiled whole."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, transformer_options={}):  # noqa: B006
        return self.b(self.a(x).relu())


@pytest.mark.parametrize("patches", [{}, {"attn1_patch": [print]}], ids=["", "with an obstacle to CUDA graphs"])
@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_a_model_that_is_one_block_is_compiled_and_captured(engine, monkeypatch, when, patches):
    capture_again(engine, monkeypatch)
    trust(engine, monkeypatch, "test_replay.py")
    network, x = OneBlock().requires_grad_(False), torch.ones(2, 4)
    runs, loaded = CompiledRuns(), engine("host.weights.blocks").Loaded(network, network, x.dtype, x.device)
    expected, host_calls = network(x), engine("host.model.network_calls")
    calls = host_calls.NetworkCalls(compile_settings(engine, compile_when=when))
    host_calls.begin_run(network)
    with runs.installed():
        for _ in range(4):
            with calls.prepared() as call:
                run = functools.partial(network, x, transformer_options={"patches": patches})
                assert torch.equal(calls.run(loaded, call, x.numel(), run), expected)
            assert engine("background.thread").compiler.wait(60)
    assert runs.by_block(network, ["OneBlock"])[""] >= 2, calls.notes
    assert (engine("cuda_graphs.capture").graphs_of(network).captures > 0) == (not patches)
    assert engine("compile.registry").code_of(network).eager_in_words() == []


def test_what_cannot_be_captured_is_said_with_the_cure(engine, monkeypatch):
    no_graphs, others = engine("host.graphs.policy").no_graphs, []
    assert no_graphs(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert no_graphs(torch.device("cuda")) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.13.1+cu130")
        assert "2.13" in no_graphs(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(engine("torch_compat.private"), "CAPTURES_ASYNC", {".".join(torch.__version__.split(".")[:2])})
    monkeypatch.setattr(engine("host.graphs.policy"), "others_in_use", lambda _device: others)
    assert no_graphs(torch.device("cuda")) is None
    others.append(torch.device("cuda", 1))
    assert "cuda:1" in (said := no_graphs(torch.device("cuda"))) and "--disable-cuda-malloc" in said
    monkeypatch.setattr(engine("torch_compat.private"), "CAPTURES_ASYNC", set())
    assert "--disable-cuda-malloc" in no_graphs(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert "another node" in no_graphs(torch.device("cuda"))


@pytest.mark.parametrize("mode", ["auto", "reduce-overhead"])
def test_with_an_allocator_that_forbids_it_blocks_are_compiled(tiny, engine, monkeypatch, mode):
    monkeypatch.setattr(engine("host.graphs.policy"), "no_graphs", lambda _device: "CUDA graphs are off: the allocator.")
    monkeypatch.setattr(engine("settings").CompileSettings, "may_have_graphs", True)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", mode != "auto")
    runs = Runs(tiny, engine, "sdxl", cfg=1.0, steps=2)
    settings = compile_settings(engine, mode=mode, compile_when="before first image")
    compiled = engine("host.model.attach").attach(runs.patcher, settings)
    assert relative_error(runs.run(compiled), runs.run(runs.patcher)) < 1e-6
    code = engine("compile.registry").code_of(runs.patcher.model.diffusion_model)
    assert "ResBlock" in eager_blocks(code)["CONVOLUTIONS"] and any(group.stats.graphs for group in code.groups.values())
    notes = engine("host.model.attach").notes_about(compiled)
    assert notes.count("CUDA graphs are off: the allocator.") == 1 and not graphs_of(runs).seen


@pytest.fixture
def norms(engine, monkeypatch):
    """The kernels for channels_last, which are not ready, and a list that gets "fast" for each call of a model with them."""
    capture_again(engine, monkeypatch)
    graphing, calls = engine("host.graphs.replay"), []
    monkeypatch.setattr(engine("cuda_graphs.capture").ModelGraphs, "_checked", lambda _graphs, replayed, *_: replayed)
    monkeypatch.setattr(graphing.norm_kernels, "ready", False)
    monkeypatch.setattr(graphing.norm_kernels, "prepare", lambda *_: None)

    def fast(_network, forward, *args, **kwargs):
        calls.append("fast")
        return forward(*args, **kwargs)

    monkeypatch.setattr(graphing, "_with_fast_convolutions", fast)
    return graphing.norm_kernels, calls


def test_kernels_that_get_ready_before_a_runs_first_capture_are_in_it(norms, own_code, tiny, engine, monkeypatch):
    """Else the first prompt's graph lacks them, and the second prompt captures it anew."""
    kernels, calls = norms
    monkeypatch.setattr(kernels, "prepare", lambda *_: setattr(kernels, "ready", True))
    runs = Runs(tiny, engine, "sdxl", cfg=1.0, steps=6)
    compiled = runs.attach(runs.patcher, compile_when="in background", backend="eager")
    runs.run(compiled)
    assert engine("background.thread").compiler.wait(60)
    runs.run(compiled)
    graphs_of(runs).drop()
    kernels.ready = False
    del calls[:]

    def captures():
        before = graphs_of(runs).captures
        runs.run(compiled)
        return graphs_of(runs).captures - before

    assert captures() == 1 and calls
    assert captures() == 0


@pytest.mark.parametrize(
    ("model", "when", "expected"),
    [("sdxl", "in background", 1), ("sdxl", "before first image", 0), ("flux", "in background", 0)],
)
def test_the_node_has_the_kernels_of_a_unets_graphs_made(tiny, engine, monkeypatch, model, when, expected):
    """Before the first step, which loads weights."""
    capture_again(engine, monkeypatch)
    asked = []
    monkeypatch.setattr(engine("host.model.network_calls").norm_kernels, "prepare", asked.append)
    runs = Runs(tiny, engine, model)
    runs.attach(runs.patcher, compile_when=when)
    assert len(asked) == expected


def test_kernels_that_get_ready_between_two_calls_are_not_captured_before_they_have_run(
    norms, own_code, tiny, engine, monkeypatch
):
    """Triton loads a kernel when it first runs; in a capture from cudaMallocAsync that ended the process."""
    kernels, calls = norms
    runs = Runs(tiny, engine, "sdxl", cfg=1.0, steps=1)
    compiled = runs.attach(runs.patcher, compile_when="in background", backend="eager")
    graphs = graphs_of(runs)

    def step():
        del calls[:]
        before = graphs.captures
        runs.run(compiled)
        return ["captured"] * (graphs.captures - before) + calls

    with monkeypatch.context() as patch:
        patch.setattr(engine("compile.registry").ModelCode, "is_being_compiled", True)
        assert (step(), step()) == ([], ["captured"])
    assert engine("background.thread").compiler.wait(60)
    code = engine("compile.registry").code_of(runs.patcher.model.diffusion_model)
    assert step() == [] and eager_blocks(code)
    with monkeypatch.context() as patch:
        patch.setattr(type(code), "is_being_compiled", True)
        kernels.ready = True
        assert step() == ["captured"], "as the plain call before it"
    assert step() == ["fast"], "they run plainly first"
    assert step() == ["captured", "fast"]


def test_a_graph_that_was_captured_last_in_a_run_is_checked_in_the_next(flux):
    network = flux.patcher.model.diffusion_model
    graphs = flux.engine("cuda_graphs.capture").graphs_of(network)
    flux.run(flux.attach(flux.patcher))
    graphs.is_check_due = True
    flux.engine("host.graphs.replay").new_run(network)
    assert graphs.is_check_due
