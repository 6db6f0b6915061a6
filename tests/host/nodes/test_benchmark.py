"""The benchmark in the real host: fair rounds, nothing compiled in them but the warm one, nothing left behind."""

import json
from pathlib import Path

import pytest
import torch
import zoo
from capturing import capture_again, trust
from paging import paged
from patch_kinds.weights import load_partly
from patching import Runs
from patching import shares_code as fresh_dynamo  # noqa: F401
from support import NoCompiler, compile_settings, torch_settings

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Benchmarked(Runs):
    """A tiny model whose every call notes whether its blocks run compiled."""

    def __init__(self, tiny, engine, name="flux", cfg=1.0, **settings):
        super().__init__(tiny, engine, name, cfg=cfg, only="single_blocks.*" if name == "flux" else "")  # one kind is enough
        self.calls = []
        self.compiled = self.attach(self.patcher, **settings)
        # Behind ours in the chain: the note is taken inside of it.
        self.compiled.add_wrapper_with_key("apply_model", "test", self.note)

    def note(self, executor, *args, **kwargs):
        network = executor.class_obj.diffusion_model
        self.calls.append("compiled" if any("forward" in m.__dict__ for m in network.modules()) else "eager")
        return executor(*args, **kwargs)

    def benchmark(self, steps=3, size=(64, 64), **options):
        size = self.engine("host.nodes.warmup_plan").Size(*size)
        run = self.engine("host.nodes.benchmark").benchmark
        return run(self.compiled, self.positive, self.negative, size, self.cfg, steps, **options)


@pytest.fixture
def benchmarked(tiny, engine):
    return lambda *args, **settings: Benchmarked(tiny, engine, *args, **settings)


def test_nothing_is_captured_while_it_is_timed(benchmarked, engine, monkeypatch):
    """Nor while CUDA graphs and attention are chosen, in a model that has not run yet."""
    capture_again(engine, monkeypatch)
    trust(engine, monkeypatch, "test_benchmark.py")
    settings = engine("settings").CompileSettings
    monkeypatch.setattr(settings, "wants_graphs", False)  # but measures whether they pay
    monkeypatch.setattr(settings, "may_have_graphs", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    runs, captures = benchmarked(), []
    graphs = engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model)

    def count(executor, *args, **kwargs):
        result = executor(*args, **kwargs)
        captures.append(graphs.captures)
        return result

    runs.compiled.add_wrapper_with_key("apply_model", "count", count)
    runs.benchmark(steps=3)
    timed = captures[-2 - 3 * 6 :]  # the last two are profiled
    assert set(timed) == {graphs.captures} and graphs.captures


def test_rounds_alternate_and_only_the_warm_one_compiles(own_code, benchmarked):
    runs = benchmarked()
    result = runs.benchmark(steps=3)
    e, c = "eager", "compiled"
    assert runs.calls == [e] * 2 + [c] * 4 + [e] * 3 + [c] * 6 + [e] * 6 + [c] * 3 + [c] * 2  # the last two are profiled
    assert result.late_graphs == 0
    assert result.cost.graphs == runs.graphs == 1 and result.cost.cold
    assert 0 < result.cost.seconds <= result.cost_seconds
    assert [len(steps) for steps in result.eager.rounds] == [len(steps) for steps in result.compiled.rounds] == [3, 3, 3]
    assert min(result.eager.fastest, result.compiled.fastest) > 0
    assert result.error == result.repeat_error == 0.0
    assert (result.size, result.batch, result.video, result.trace) == ("64x64 batch 1", 1, False, None)


@pytest.mark.parametrize(("dynamic", "for_another_size"), [("auto", 0), pytest.param("false", 1, marks=pytest.mark.rest)])
def test_again_it_is_already_warm_and_says_so(own_code, benchmarked, dynamic, for_another_size):
    runs = benchmarked(dynamic=dynamic)
    runs.benchmark(steps=1)
    graphs = runs.graphs
    again = runs.benchmark(steps=1)
    assert not again.cost.cold and again.cost.graphs_before == again.cost.graphs == graphs == runs.graphs
    assert "Already warm when the benchmark began" in again.table()
    other_size = runs.benchmark(steps=1, size=(96, 64))
    assert other_size.cost.graphs == graphs + for_another_size and not other_size.cost.cold


def test_code_that_was_read_from_disk_is_told(benchmarked, engine, monkeypatch, tmp_path):
    code_store, registry = engine("cache.code_store"), engine("compile.registry")
    NoCompiler(engine, monkeypatch.setattr)
    monkeypatch.setattr(code_store._Current, "opened", True)
    monkeypatch.setattr(code_store._Current, "store", code_store.CodeStore(tmp_path, 2**20, b"k" * 32))
    monkeypatch.setattr(engine("compile_process.client").compile_process, "start", lambda: None)
    results = []
    for _process in range(2):
        registry._groups.clear()
        torch._dynamo.reset()
        results.append(benchmarked(backend="inductor").benchmark(steps=1))
    assert [(result.cost.graphs, result.cost.from_disk) for result in results] == [(1, 0), (1, 1)]
    assert ["read from the cache on disk" in result.table() for result in results] == [False, True]


def test_the_error_is_that_of_the_samplers_result(benchmarked):
    """A patch that acts on compiled runs only must show as an error, of the size that two runs of the sampler are apart."""
    runs = benchmarked()
    assert runs.benchmark(steps=2).error == 0.0

    def scaled(executor, *args, **kwargs):
        return executor(*args, **kwargs) * 1.5

    scaled.notes, scaled.status, scaled.begin_run, scaled.end_run = [], None, list, list
    runs.compiled.add_wrapper_with_key("apply_model", runs.engine("host.model.attach").KEY, scaled)
    changed = runs.benchmark(steps=2)
    assert changed.error > 0.1 and changed.repeat_error == 0.0


def test_the_eager_side_keeps_lora_and_patches(benchmarked, engine):
    runs = benchmarked()
    key = "diffusion_model.single_blocks.0.linear1.weight"
    runs.compiled.add_patches({key: (torch.ones(runs.patcher.model.state_dict()[key].shape),)}, 0.1)
    runs.compiled.set_model_attn1_patch(lambda q, k, v, **_: {"q": q, "k": k, "v": v * 0.5})
    eager = engine("host.model.attach").eager_clone(runs.compiled)
    assert engine("host.model.attach").attached_settings(eager) is None
    assert eager.patches == runs.compiled.patches and eager.patches_uuid == runs.compiled.patches_uuid
    assert (
        eager.model_options["transformer_options"]["patches"] == runs.compiled.model_options["transformer_options"]["patches"]
    )
    assert eager.get_wrappers("apply_model", "test") == [runs.note]
    assert torch.equal(runs.run(eager), runs.run(runs.compiled))
    assert not torch.equal(runs.run(eager), runs.run(runs.patcher))


def test_model_random_state_and_settings_are_as_found(benchmarked):
    runs = benchmarked()
    runs.run(runs.compiled)
    weights = {name: tensor.clone() for name, tensor in runs.patcher.model.state_dict().items()}
    compiled, graphs = runs.compiled, runs.graphs
    wrappers = {kind: {key: list(found) for key, found in keys.items()} for kind, keys in compiled.wrappers.items()}
    callbacks = {event: {key: list(found) for key, found in keys.items()} for event, keys in compiled.callbacks.items()}
    expected, settings, state = runs.run(compiled), torch_settings(), torch.get_rng_state()
    runs.benchmark(steps=1, trace=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch_settings() == settings
    assert compiled.wrappers == wrappers and compiled.callbacks == callbacks
    after = runs.patcher.model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    assert not any("forward" in module.__dict__ for module in runs.patcher.model.modules())
    assert torch.equal(runs.run(compiled), expected) and runs.graphs == graphs


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_traces_are_files_with_events_of_one_step(benchmarked, backend):
    import folder_paths

    runs = benchmarked(backend=backend)
    results = [runs.benchmark(steps=1, trace=True) for _ in range(2)]
    first, second = (result.trace for result in results)
    for result in results:
        assert result.error < 1e-4 and (result.error > 0) == (backend == "inductor") and result.repeat_error == 0.0
    assert results[0].cost.graphs == runs.graphs == 1 and not any(result.late_graphs for result in results)
    assert len({*first.files, *second.files}) == 4, "a second run must not write over the first"
    for path, side in zip(first.files, ("eager", "compiled"), strict=True):
        assert path.startswith("torch-compile-kit/Flux-64x64") and side in path
        events = json.loads((Path(folder_paths.get_output_directory()) / path).read_text())["traceEvents"]
        attention = [e for e in events if e.get("name") == "aten::scaled_dot_product_attention"]
        if side == "eager":  # one a block: 2 double, 4 single
            assert len(attention) == 6
        assert any("Torch-Compiled Region" in str(e.get("name")) for e in events) == (side == "compiled")
    if not torch.cuda.is_available():
        assert first.unit == "operators"
    assert first.compiled > 0 and (first.compiled < first.eager) == (backend == "inductor")


def test_without_a_folder_for_the_traces_the_rounds_are_told(benchmarked, tmp_path, caplog):
    import folder_paths

    taken, before = tmp_path / "output", folder_paths.get_output_directory()
    taken.write_text("a file, which holds no folder")
    folder_paths.set_output_directory(str(taken))
    try:
        result = benchmarked().benchmark(steps=1, trace=True)
    finally:
        folder_paths.set_output_directory(before)
    assert len(result.compiled.rounds) == 3 and result.trace is None
    assert "No traces were written: the log says why." in result.table() and "not measured: a step" in caplog.text


def test_progress_counts_every_step_once(benchmarked):
    import comfy.utils

    seen, runs = [], benchmarked()  # which samples where an earlier test has dropped the code that tests share
    before = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *_args, **_kwargs: seen.append((value, total)))
    try:
        runs.benchmark(steps=2, trace=True)
    finally:
        comfy.utils.set_progress_bar_global_hook(before)
    total = 3 * 2 + 3 * 2 * 2 + 2 * 2
    assert seen[-1] == (total, total) and [value for value, _ in seen] == sorted({value for value, _ in seen})


MOMENTS = {"warm compiled": 3, "trace": 22}
OTHER_MOMENTS = {"warm eager": 1, "eager": 5, "compiled": 9}


@pytest.mark.parametrize(
    "at",
    [*MOMENTS.values(), *(pytest.param(at, marks=pytest.mark.rest) for at in OTHER_MOMENTS.values())],
    ids=[*MOMENTS, *OTHER_MOMENTS],
)
def test_interrupt_stops_it_between_steps_and_leaves_all_as_found(benchmarked, at):
    import comfy.model_management

    runs = benchmarked()
    runs.run(runs.compiled)
    runs.calls.clear()

    def interrupt(executor, *args, **kwargs):
        if len(runs.calls) == at:
            comfy.model_management.interrupt_current_processing()
        return executor(*args, **kwargs)

    runs.compiled.add_wrapper_with_key("apply_model", "interrupt", interrupt)
    settings, state = torch_settings(), torch.get_rng_state()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        runs.benchmark(steps=3, trace=True)
    assert len(runs.calls) <= at + 1
    assert torch_settings() == settings and torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in module.__dict__ for module in runs.patcher.model.modules())
    del runs.compiled.wrappers["apply_model"]["interrupt"]
    runs.calls.clear()
    assert runs.benchmark(steps=1).late_graphs == 0, "the next one works"


def test_no_notice_of_compiling_while_sampling(benchmarked, caplog):
    benchmarked().benchmark(steps=1)
    assert not [r for r in caplog.records if "while sampling" in r.getMessage()]


def test_latent_replaces_the_size_and_cfg_runs_the_negative(benchmarked, tiny):
    runs = benchmarked("sdxl", cfg=5.0)
    latent = {"samples": tiny.empty_latent("sdxl", 128, 64, batch_size=2)}
    result = runs.benchmark(steps=1, latent=latent)
    assert result.size.startswith("128x64 batch 2") and result.batch == 2 and result.error == 0.0


def test_a_latent_of_video_and_sound(benchmarked, engine):
    setup, runs = zoo.SETUPS["ltxav"], benchmarked()
    runs.patcher, (runs.positive, runs.negative) = setup.patcher(), setup.conds()
    runs.compiled = engine("host.model.attach").attach(runs.patcher, compile_settings(engine))
    result = runs.benchmark(steps=1, latent={"samples": setup.latent()})
    assert result.size.endswith("batch 1 (latent_image)") and result.video and result.error == 0.0


def test_video_model(benchmarked):
    result = benchmarked("wan").benchmark(steps=1, size=(64, 64, 5))
    assert result.video and result.size == "64x64x5 batch 1" and "a video" in result.table()


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("share", [0.5, pytest.param(0.0, marks=pytest.mark.rest)])
def test_partly_loaded_weights(benchmarked, share):
    runs = benchmarked()
    for patcher in (runs.patcher, runs.compiled):
        load_partly(patcher, share)
    result = runs.benchmark(steps=2)
    assert result.late_graphs == 0 and runs.graphs == 1 and result.error < 1e-6


def test_paged_weights(benchmarked, monkeypatch):
    runs = benchmarked()
    with paged(monkeypatch, runs.patcher.model) as pages:
        pages.resident = set(list(pages.layers)[::2])
        result = runs.benchmark(steps=2)
        assert pages.faults > 0 and pages.pinned == 0
    assert result.late_graphs == 0 and runs.graphs == 1 and result.error < 1e-6
    assert "Weights that move are placed in the same way for both" in result.table()


def test_the_eager_clone_places_and_frees_as_the_compiled_one(benchmarked, engine):
    """Two orders of placing in turn would fill the device with both, and graphs must go when the host unloads the model."""
    runs = benchmarked()
    eager, key = engine("host.model.attach").eager_clone(runs.compiled), engine("host.model.attach").KEY
    for owner in ("wrappers", "callbacks"):
        mine, given = ({k: v[key] for k, v in getattr(p, owner).items() if key in v} for p in (eager, runs.compiled))
        given.pop("apply_model", None)
        assert mine == given
    assert runs.compiled.get_wrappers("prepare_sampling", key) == eager.get_wrappers("prepare_sampling", key) != []


def test_bad_sizes_are_named_as_in_the_warmup(benchmarked, engine):
    runs = benchmarked()
    for size, name in (((4, 64), "width"), ((64, 4), "height"), ((64, 64, 9), "length")):
        with pytest.raises(engine("errors").InvalidSetting, match=f"^{name} = "):
            runs.benchmark(size=size)
    runs.positive = [[torch.zeros(1, 4, 5), {}]]
    with pytest.raises(engine("errors").TorchCompileKitError, match=r"does not fit Flux .*from this model's text encoder\?$"):
        runs.benchmark()


def test_a_size_that_the_model_cannot_sample_is_named(engine):
    sampling = engine("host.nodes.sampling")
    said = r"^size = '64x64 batch 1': Flux cannot sample it: odd$"
    with pytest.raises(engine("errors").InvalidSetting, match=said), sampling.naming_the_size("64x64 batch 1", "Flux"):
        raise RuntimeError("odd")


def test_out_of_memory_stays_what_the_host_knows(engine):
    naming = engine("host.nodes.sampling").naming_the_size
    error = RuntimeError("CUDA error: out of memory")  # of torch.AcceleratorError, which is one
    with pytest.raises(RuntimeError) as raised, naming("64x64", "Flux"):
        raise error
    assert raised.value is error


def test_blocks_that_failed_and_switches_are_told(benchmarked):
    runs = benchmarked(allow_tf32=True)
    hook = runs.patcher.model.diffusion_model.single_blocks[0].linear1.register_forward_hook(lambda *_: None)
    try:
        text = runs.benchmark(steps=1).table()
    finally:
        hook.remove()
    assert text.count("forward hook") == 1 and "Only the compiled side has allow_tf32" in text


def test_an_uncompiled_model_gets_a_sentence(benchmarked, pack_module):
    runs = benchmarked()
    runs.compiled = runs.patcher
    assert runs.benchmark().startswith("Nothing to compare")
    node = pack_module("nodes.benchmark").Benchmark
    size = {"width": 64, "height": 64, "length": 1, "batch_size": 1}
    output = node.execute(runs.patcher, runs.positive, runs.negative, 1.0, 2, False, **size)
    (table,) = output.args
    assert "put Torch Compile" in table and output.ui == {"text": [table]}
