"""Compiling is put off where it would take longer than it saves."""

import gc
import math
import threading
import types
import unittest.mock

import pytest
import torch
from sampling import sample

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
ONLY = "single_blocks.*"  # to trace a kind of block takes half a second


@pytest.fixture
def store(engine, monkeypatch, tmp_path):
    code_store = engine("cache.code_store")
    store = code_store.CodeStore(tmp_path, 2**30, code_store.read_key(tmp_path))
    monkeypatch.setattr(code_store._Current, "opened", True)
    monkeypatch.setattr(code_store._Current, "store", store)
    return store


@pytest.fixture(scope="module")
def plain(tiny):
    """The image of five steps without the node."""
    with torch.inference_mode():
        return sample(tiny.build_patcher("flux"), tiny.conditioning("flux"), tiny.empty_latent("flux"), 1.0, seed=1, steps=5)


@pytest.fixture
def flux(engine, tiny, monkeypatch, store, plain):
    """run(compile) samples five steps as on a GPU, and gives the graphs so far and the line of the node."""
    payback, attachment = engine("host.model.payback"), engine("host.model.attach")
    records = engine("host.model.structure_record")
    monkeypatch.setattr(payback, "counts_runs_on", lambda _device: True)
    monkeypatch.setattr(records, "_records", {})
    monkeypatch.setattr(records, "call_later", lambda _seconds, write: write())
    patcher, conditioning = tiny.build_patcher("flux"), tiny.conditioning("flux")
    network = patcher.model.diffusion_model

    def run(compile_when="in background", steps=5, sampler="euler", **latent_of):
        latent = tiny.empty_latent("flux", **latent_of)
        settings = engine("settings").CompileSettings(backend="eager", compile_when=compile_when, only_blocks=ONLY)
        model = attachment.attach(patcher, settings, node="7")
        result = sample(model, conditioning, latent, 1.0, seed=1, steps=steps, sampler=sampler)
        assert engine("background.thread").compiler.wait(60)
        assert (steps, sampler) != (5, "euler") or latent_of or torch.allclose(result, plain, atol=1e-4)
        groups = engine("compile.registry").code_of(network).groups.values()
        line = engine("messages.status").lines_of()["7"]
        return sum(group.stats.graphs for group in groups), line

    run.conditioning = conditioning
    run.notes = lambda: attachment.notes_about(attachment.attach(patcher, engine("settings").CompileSettings()))

    def cost(seconds):
        monkeypatch.setattr(records, "TRACE", seconds / payback.FIRST_TIME)

    run.cost, run.network = cost, network
    return run


def test_what_would_not_pay_back_runs_as_without_this_pack_and_says_so(flux):
    flux.cost(1e6)
    for _ in range(2):
        graphs, line = flux()
        assert graphs == 0 and line.says[0] == "putOff" and line.says[1] > 1000 and line.state == "unclear"


def test_it_compiles_as_soon_as_it_would_pay_back(flux):
    """Also in the middle of a run: a longer one."""
    flux.cost(1e6)
    assert flux()[0] == 0
    flux.cost(1e-9)
    graphs, line = flux()
    assert graphs == 1 and line.says[0].startswith("ready")


@pytest.fixture
def a_call_takes(monkeypatch, engine):
    """A list with the seconds of the calls of each run of the sampler from now on; the last number is for the others, too."""
    payback, seconds, of_a_call = engine("host.model.payback"), [0.0], [0.1]
    for module in (payback, engine("devices")):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    is_worthwhile = payback.Payback.is_worthwhile

    def timed(self, *args):
        result = is_worthwhile(self, *args)
        seconds[0] += of_a_call[min(self._calls, len(of_a_call)) - 1]
        return result

    monkeypatch.setattr(payback.Payback, "is_worthwhile", timed)
    return of_a_call


def test_one_large_prompt_is_no_reason_to_compile(flux, a_call_takes):
    flux.cost(6.0)
    for a_call_takes[0] in (0.1, 1.0):  # 1 s saved in ten prompts, 10 s in ten of the larger, 5.5 s in ten of both
        assert flux()[0] == 0


def test_a_preview_of_few_steps_does_not_put_off_longer_prompts(flux, a_call_takes):
    flux.cost(0.75)
    assert flux(steps=3)[0] == 0  # 0.6 s saved in ten prompts
    assert flux(steps=5)[0] == 1  # 0.8 s in ten of each kind


def test_one_large_batch_among_small_ones_is_no_reason_to_compile(flux, a_call_takes):
    """Z-Image on an H100: a batch of two, once in a session of 13 prompts, made that session longer."""
    flux.cost(1.0)
    for steps in (3, 3, 3, 5):
        assert flux(steps=steps)[0] == 0  # 0.7 s in ten prompts, and 1 s in ten of the largest
    assert [flux(steps=5)[0] for _ in range(9)][-1] == 1


def test_a_run_of_one_step_is_counted_from_the_models_second_on(flux, a_call_takes):
    """As SDXL Turbo has, or a refiner's last step; in the first one the call also loads weights."""
    flux.cost(1e6)
    assert flux(steps=1)[0] == 0
    a_call_takes[0] = 1.0
    graphs, line = flux(steps=1)
    assert (graphs, line.says[0]) == (0, "putOff")
    flux.cost(1.9)  # 2 s saved in ten of the second
    assert flux(steps=1)[0] == 1


def test_calls_of_samplers_that_call_the_model_twice_a_step_are_counted(flux, a_call_takes):
    flux.cost(1.5)
    assert flux(sampler="heun")[0] == 0  # 1 s saved in ten prompts, as far as can be told from the first calls
    assert flux(sampler="heun")[0] == 1  # 1.8 s


def test_what_a_unet_saves_is_told_by_replays_that_have_settled(flux, engine, a_call_takes, monkeypatch):
    """Its graph is captured and compared after the calls that are timed first; nor does one begin in its first run."""
    monkeypatch.setattr(engine("host.model.wrapper"), "always_replays", lambda *_: True)
    flux.cost(1.0)
    a_call_takes[:] = [9.0, *[1.0] * 7, 0.02]
    for _ in range(3):
        assert flux(steps=20)[0] == 0  # 0.08 s saved in a prompt; by its first calls 4 s
    flux.cost(0.75)
    assert flux(steps=20)[0] == 1


def test_a_unet_that_is_replayed_waits_for_the_gpu_but_a_few_times(flux, engine, monkeypatch):
    payback, waits = engine("host.model.payback").Payback, []
    monkeypatch.setattr(engine("host.model.wrapper"), "always_replays", lambda *_: True)
    monkeypatch.setattr(payback, "_now", lambda self, now=payback._now: waits.append(self._calls) or now(self))
    flux.cost(1e6)
    flux(steps=20)
    assert waits == [5, 9, 20]


@pytest.fixture
def unet_runs(engine, monkeypatch):
    """run(calls, steps, replayed, captured): a run in which so many calls are replayed, of 0.5 s each, and after one of them
    a graph is captured; the call that decided, and after how many runs compiling is to begin."""
    module, records, now = engine("host.model.payback"), engine("host.model.structure_record"), [0.0]
    monkeypatch.setattr(module, "counts_runs_on", lambda _device: True)
    monkeypatch.setattr(module.Payback, "_now", lambda _self: now[0])
    monkeypatch.setattr(module, "get_ready_to_compile", lambda: None)
    monkeypatch.setattr(records.Record, "keep", lambda _self: None)
    network = torch.nn.Linear(1, 1)
    payback = module.Payback(records.Record("a" * 12))

    def run(calls, steps, replayed=math.inf, captured=None):
        engine("compile.registry").code_of(network).runs += 1
        decided, sigmas = None, torch.linspace(1, 0, steps + 1)
        for call in range(1, calls + 1):
            options = {"sigmas": torch.zeros(1), "sample_sigmas": sigmas}
            payback.is_worthwhile(network, torch.zeros(1), options, replays=call <= replayed)
            decided = decided or (call if payback.record.is_decided else None)
            now[0] += 0.5
            if call == captured:
                now[0] += 20
                engine("cuda_graphs.capture").graphs_of(network).captures += 1
        payback.end_run(network)
        return decided, payback.after

    run.record = payback.record
    return run


def test_code_of_another_pack_that_ends_replays_lets_a_later_call_decide(unet_runs):
    assert unet_runs(30, 30, replayed=6) == (9, None)


@pytest.mark.parametrize(("calls", "replayed"), [(7, math.inf), (30, 7)], ids=["cancelled", "another pack's code"])
def test_a_capture_is_not_counted_as_a_slow_call(unet_runs, calls, replayed):
    decided, _ = unet_runs(calls, 30, replayed, captured=6)
    record = unet_runs.record
    assert record.runs == 0 or record.seconds / record.runs < 0.6 * calls
    assert decided is None or decided > 7


def test_a_step_cache_around_the_model_leaves_too_few_calls_for_replays_to_settle_and_they_are_counted(unet_runs):
    """ComfyUI's LazyCache skips whole calls of the model."""
    assert unet_runs(8, 12) == (None, 1)
    assert unet_runs(8, 12) == (1, None)


def test_a_unet_of_few_steps_is_counted_and_offered_from_its_first_run_on(flux, engine, a_call_takes, monkeypatch):
    monkeypatch.setattr(engine("host.model.wrapper"), "always_replays", lambda *_: True)
    flux.cost(1e6)
    graphs, line = flux(steps=4)
    assert graphs == 0 and line.says[0] == "putOff" and line.begins
    _, record = max(engine("host.model.structure_record")._records.items(), key=lambda item: item[1].runs)
    counts = [record.runs]
    for _ in range(2):
        flux(steps=4)
        counts.append(record.runs)
    assert counts == [1, 1, 2], "but for the second, in which its graph is captured"


def test_the_compiler_is_imported_beside_the_first_call_or_between_runs(flux, engine, a_call_takes, monkeypatch):
    asked = []
    monkeypatch.setattr(engine("host.model.payback"), "get_ready_to_compile", lambda: asked.append(1))
    flux.cost(1.5)
    flux()
    assert not asked, "a tiny model"
    flux()
    assert not asked, "compiling is put off"
    a_call_takes[:] = [*[0.1] * 5, 2.0]
    assert flux(steps=10)[0] == 0 and len(asked) == 1, "the next run is compiled"
    flux(steps=10)
    assert len(asked) == 1, "there is code"


def test_it_is_imported_before_the_run_in_which_compiling_begins(flux, engine, a_call_takes, monkeypatch):
    """Qwen-Image-Edit on an H200: two steps of 1.1 s instead of 0.25, as the import ran beside the sampler."""
    asked, payback = [], engine("host.model.payback")
    monkeypatch.setattr(payback, "get_ready_to_compile", lambda: asked.append(1))
    monkeypatch.setattr(payback, "RUNS", 1)
    flux.cost(0.5)
    told = []
    while not flux()[0]:
        told.append(engine("messages.status").lines_of()["7"].says[1])
        assert len(asked) == (told[-1] == 1), told
    assert told[-2:] == [2, 1] and len(asked) == 1, told


@pytest.mark.parametrize("is_long", [False, True])
def test_in_a_structures_first_call_the_compiler_is_imported_if_the_run_will_be_long(
    flux, engine, a_call_takes, monkeypatch, is_long
):
    """Z-Image Turbo on an H200 is not compiled for 17 runs, and the import made its first image 1.6 s longer."""
    asked, payback = [], engine("host.model.payback")
    monkeypatch.setattr(payback, "get_ready_to_compile", lambda: asked.append(1))
    flux.cost(6.0)  # ten runs of five steps save that if each step takes 0.6 s
    multiplications = payback.least_seconds(flux.network, torch.zeros(1, 16, 8, 8)) * payback.FASTEST
    monkeypatch.setattr(payback, "FASTEST", multiplications / (0.65 if is_long else 0.55))
    flux()
    assert len(asked) == is_long


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
def test_a_slow_call_is_no_reason_to_compile(flux, a_call_takes, slow):
    """Weights are loaded in the first one; something may be made ready in another."""
    flux.cost(2.0)
    a_call_takes[:] = [9.0 if number == slow else 0.1 for number in range(1, 6)]
    assert flux()[0] == 0


@pytest.mark.parametrize("skipped", [2, 3, 4])
def test_a_step_that_a_step_cache_skips_does_not_put_off_compiling(flux, a_call_takes, skipped):
    """A step is skipped inside of the model (EasyCache, packs), and takes no time."""
    flux.cost(0.75)
    a_call_takes[:] = [0.0 if number == skipped else 0.1 for number in range(1, 6)]
    assert flux()[0] == 1


def test_nor_do_most_of_those_that_are_timed(flux, a_call_takes):
    flux.cost(0.75)
    a_call_takes[:] = [0.1, 0.0, 0.0, 0.1, 0.3]
    assert [flux()[0] for _ in range(2)] == [0, 1]


def test_a_batch_that_changes_in_the_first_steps_ends_no_prompt(flux):
    """A part of the prompt that begins later (ConditioningSetTimestepRange)."""
    flux.cost(1e6)
    (embedding, about), *_ = flux.conditioning[0]
    flux.conditioning[0].append([embedding * 0.5, {**about, "start_percent": 0.3, "end_percent": 1.0}])
    for steps in (4, 6):
        assert flux(steps=steps)[0] == 0


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_few_steps_are_measured_too(flux, steps):
    flux.cost(1e-9)
    flux(steps=steps)
    assert flux(steps=steps)[0] == 1


def test_who_waits_for_code_gets_it_and_others_use_it(flux):
    flux.cost(1e6)
    assert flux("before first image")[0] == 1
    graphs, line = flux()
    assert graphs == 1 and line.says[0].startswith("ready")


@pytest.fixture
def compiled_flux(flux, engine, monkeypatch, a_call_takes):
    """run(...) as of `flux`, and its number of graphs; there is code for a batch of one. A trace is said to take 0.19 s, calls
    take 0.1 s, of which code saves a fifth."""
    flux.cost(1e-9)
    for _ in range(3):
        flux()
    monkeypatch.setattr(engine("host.model.structure_record").Record, "expected_trace", lambda _self, _most: 0.19)
    at_once = property(lambda _code: 0.0, lambda _code, _seconds: None)  # the clock of calls is not that of lowering
    monkeypatch.setattr(engine("compile.compiled_code").BlockCode, "lowering", at_once)
    return lambda *args, **kwargs: flux(*args, **kwargs)[0]


def test_a_batch_that_comes_once_is_not_traced_and_one_that_comes_again_is(compiled_flux, flux):
    """Flux on an H200: the first image of a batch of two took 10.1 s of eager's 7.8."""
    assert compiled_flux() == compiled_flux(batch_size=2) == 1, "0.1 s is lost in five steps"
    assert any("had no code for the batch" in note for note in flux.notes())
    assert compiled_flux(width=128) == compiled_flux() == 1, "sizes that have code run compiled, and tell nothing"
    assert compiled_flux(batch_size=2) == 2
    assert compiled_flux(batch_size=2, compile_when="before first image") == 2


def test_a_batch_of_a_model_that_is_replayed_is_traced_at_once(compiled_flux, engine, monkeypatch):
    """A graph of its uncompiled operators would be replayed from its second call on, for good."""
    calls = engine("host.model.network_calls")
    monkeypatch.setattr(calls, "way_of_call", lambda *_: calls.Way.REPLAYED)
    monkeypatch.setattr(calls, "graphed", lambda _loaded, binding, *_: binding.bound())
    assert compiled_flux() == 1
    assert compiled_flux(batch_size=2) == 2


def test_who_waits_gets_code_for_a_batch_that_comes_once(compiled_flux):
    assert compiled_flux("before first image", batch_size=2) == 2


@pytest.mark.parametrize(("steps", "graphs"), [(5, 2), (7, 1)], ids=["last call", "earlier call"])
def test_after_a_trace_in_a_runs_last_call_others_begin_at_once_in_the_next(flux, engine, monkeypatch, steps, graphs):
    """That run alone can show what the trace does not fit."""
    flux.cost(1e-9)
    assert flux(steps=steps)[0] == 1  # in its fifth call
    monkeypatch.setattr(engine("host.model.structure_record").Record, "expected_trace", lambda _self, _most: 1e6)
    assert flux(batch_size=2)[0] == graphs


@pytest.mark.parametrize("was_full", [False, True])
def test_what_another_pack_has_reset_is_made_again_at_once(compiled_flux, engine, was_full):
    """Also where PyTorch had refused a variant: such calls are not counted as lacking code."""
    assert compiled_flux() == 1
    for network in engine("host.model.payback").payback_of.items():
        for group in engine("compile.registry").code_of(network[0]).groups.values():
            group.code.limit_reached |= was_full
    torch._dynamo.reset()
    assert compiled_flux() == 2


def test_what_a_run_that_waits_has_left_is_traced_in_the_next(compiled_flux):
    assert compiled_flux("before first image") == 1
    assert compiled_flux(batch_size=2) == 2


def test_the_line_says_so_and_the_user_can_have_it_begin_now(compiled_flux, flux, engine):
    _, line = flux(batch_size=2)
    assert (line.state, line.says) == ("unclear", ["putOff", 1])
    assert engine("host.model.payback").begin_now(line.begins)
    assert engine("messages.status").lines_of()["7"].says == ["beginsNext"]
    graphs, line = flux(batch_size=2)
    assert graphs == 2 and line.says[0].startswith("ready")


@pytest.fixture
def further(engine, monkeypatch):
    """run(calls, steps, ...) of a model that has code; a trace takes 1 s, calls of the sampler lose 0.1 s.

    In each call numbers of the code grow as they are given; whether traces are put off, by call. `run.later` is for the same
    code of another model."""
    module, records, now = engine("host.model.payback"), engine("host.model.structure_record"), [0.0]
    group = types.SimpleNamespace(
        stats=types.SimpleNamespace(graph_breaks=0), code=types.SimpleNamespace(version=0, has_code=True, lowering=0.0)
    )
    code = types.SimpleNamespace(runs=1, put_off=0, lacking=0, traced=0.0, lowered=0.0, compiles=1)
    code.groups, code.groups_of = {(): group}, lambda _settings: [group]
    monkeypatch.setattr(module, "counts_runs_on", lambda _device: True)
    monkeypatch.setattr(module, "code_of", lambda _network: code)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(records.Record, "expected_share", 0.1)
    monkeypatch.setattr(records.Record, "expected_trace", lambda _self, _most: 1.0)
    for name in ("keep", "add_trace"):
        monkeypatch.setattr(records.Record, name, lambda *_: None)
    network, record = torch.nn.Linear(1, 1), records.Record("a" * 12)

    def runs_of(payback):
        def run(calls, steps=5, **added):
            code.runs, code.traced, decided = code.runs + 1, 0.0, []
            for _ in range(calls):
                options = {"sigmas": torch.zeros(1), "sample_sigmas": torch.linspace(1, 0, steps + 1)}
                assert payback.is_worthwhile(network, torch.zeros(1), options)
                decided.append(payback.puts_off_traces(network, None, False))
                for name, value in added.items():
                    setattr(code, name, getattr(code, name) + value)
                now[0] += 1.0
            payback.end_run(network)
            return decided

        run.payback, run.record, run.code = payback, record, group.code
        run.later = lambda: runs_of(module.Payback(record))
        run.at_once = lambda: payback.puts_off_traces(network, None, True)
        return run

    return runs_of(module.Payback(record))


def test_first_traces_that_take_several_runs_go_on(further):
    """As on slow machines: after 20 s of tracing a run traces no more. Here so do two runs."""
    further.code.has_code = False
    further.record.is_decided = True
    assert not further(1, put_off=1)[0]
    further.code.has_code = True
    assert further(3, put_off=1) == further(3) == [False] * 3
    assert further(3) == [True] * 3


def test_what_calls_have_lost_is_kept_though_the_model_is_freed(further):
    """And the same for Wan's two halves; a trace that began at once has not been paid for by it."""
    assert further(5, lacking=1)[-1] and further.payback.lacks()[0] == 2
    later = further.later()
    later.at_once()
    later(5, traced=0.1)
    assert further.record.lost == pytest.approx(0.4), "of five calls, as the first is not timed before the third"
    assert further(5, lacking=1)[-1] and not further(5, lacking=1)[0]


@pytest.mark.parametrize(("lowering", "steps", "begins"), [(0, 9, False), (0, 30, True), (15, 30, True), (25, 30, False)])
def test_only_the_steps_that_are_left_when_the_code_is_there_count(further, lowering, steps, begins):
    """A batch of two came once, in a run of 7 s: it was traced, and its code was there 20 s later."""
    further.code.lowering = lowering
    assert further(3, steps=steps) == [True, True, not begins]


def test_runs_of_few_steps_are_traced_in_the_next(further):
    """They cannot be timed. A longer one that was cancelled early says nothing."""
    further(1, steps=5, lacking=1)
    assert further(1, steps=5) == [True]
    assert further(2, steps=2, lacking=1)[-1] and further.payback.lacks()[0] == 1
    assert further(2, steps=2, traced=0.1) == [False] * 2
    assert not further(2, steps=2)[0], "the last call has traced"
    assert further(2, steps=2)[0]


def test_a_batch_of_too_few_steps_to_be_timed_is_traced_in_its_second_run(compiled_flux):
    assert [compiled_flux(batch_size=2, steps=2) for _ in range(2)] == [1, 2]


def test_a_node_whose_settings_changed_is_compiled_at_once(compiled_flux, engine, monkeypatch):
    made = engine("settings").CompileSettings
    monkeypatch.setattr(engine("settings"), "CompileSettings", lambda **values: made(dynamic="true", **values))
    assert compiled_flux() == 2


def sampled_once(engine, tiny, seed=1):
    """The diffusion model that has sampled five steps, new to this pack."""
    patcher, latent = tiny.build_patcher("flux"), tiny.empty_latent("flux")
    settings = engine("settings").CompileSettings(backend="eager", compile_when="in background", only_blocks=ONLY)
    model = engine("host.model.attach").attach(patcher, settings, node="7")
    sample(model, tiny.conditioning("flux"), latent, 1.0, seed=seed, steps=5)
    assert engine("background.thread").compiler.wait(60)
    return patcher.model.diffusion_model


def graphs_of(engine, network):
    return sum(group.stats.graphs for group in engine("compile.registry").code_of(network).groups.values())


def test_runs_are_counted_though_the_model_is_freed_after_each(flux, engine, tiny, a_call_takes):
    """As under --cache-none: each prompt loads the model, which was new to this pack each time."""
    payback_of = engine("host.model.payback").payback_of
    flux.cost(1.55)  # 1 s is saved in ten prompts, 1.6 s in sixteen
    counts = []
    for seed in range(16):
        record = payback_of(sampled_once(engine, tiny, seed)).record
        counts.append((record.runs, record.is_decided))
        gc.collect()
    assert counts == [(number, number == 16) for number in range(1, 17)]


def test_they_are_counted_through_restarts(flux, engine, tiny, a_call_takes, monkeypatch):
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    monkeypatch.setattr(records, "TRACE", 0.1)
    monkeypatch.setattr(payback, "FIRST_TIME", 15.5)
    for seed in range(16):
        record = payback.payback_of(sampled_once(engine, tiny, seed)).record
        assert record.is_decided == (seed == 15)
        gc.collect()
        if seed % 4 == 3:
            records._records.clear()


def test_what_sessions_are_too_short_for_is_not_compiled(flux, engine, tiny, a_call_takes):
    """Tracing would be paid in each."""
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    flux.cost(1.0)
    record = records.Record("a" * 12, is_kept=True)
    for record.sessions, is_decided in ((0, True), (2, True), (5, False)):
        record.session_runs = record.sessions
        is_paid = not payback.Payback(record)._runs_to_go(1.0, 1, 0)
        assert is_paid is is_decided  # 0.2 s in a run, and 0.5 s of tracing


def test_two_models_of_one_structure_are_counted_together(flux, engine, tiny):
    """Wan 2.2 samples with two, whose code is the same."""
    payback_of = engine("host.model.payback").payback_of
    one, other = (payback_of(tiny.build_patcher("flux").model.diffusion_model) for _ in range(2))
    assert one is not other and one.record is other.record


def test_what_was_compiled_is_traced_in_the_first_call_of_the_next_session(
    flux, engine, tiny, a_call_takes, store, monkeypatch
):
    """Its code is kept, so that compiling costs a trace, however much more it cost before."""
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    flux.cost(0.9)
    assert flux()[0] == 1
    record = payback.payback_of(sampled_once(engine, tiny)).record
    assert record.trace > 0
    record.trace = 0.3  # on any machine
    record.keep()
    monkeypatch.setattr(payback, "FIRST_TIME", 1e6)
    for is_kept in (True, False):
        records._records.clear()
        network = sampled_once(engine, tiny)
        assert bool(graphs_of(engine, network)) is is_kept
        assert payback.payback_of(network).record.runs == 1
        store.clear()


def test_a_trace_that_takes_longer_than_all_it_saves_is_put_off_though_code_is_kept(flux, engine, tiny, a_call_takes):
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    flux.cost(0.9)
    assert flux()[0] == 1
    record = payback.payback_of(sampled_once(engine, tiny)).record
    record.trace = 5.0
    record.keep()
    records._records.clear()
    assert not payback.payback_of(network := sampled_once(engine, tiny)).record.is_decided
    assert not graphs_of(engine, network)


def test_what_others_took_to_trace_is_expected(flux, engine, tiny, monkeypatch):
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    network, others = torch.nn.Linear(1, 1), [torch.nn.Linear(2, number) for number in range(1, 9)]

    def seconds_to_pay(seconds=0.1):
        return payback.payback_of(network)._runs_to_go(seconds, 1, 1) * seconds * payback.SAVED

    usual = payback.FIRST_TIME * records.TRACE
    assert seconds_to_pay() == pytest.approx(usual, rel=0.1)
    for other in others:  # LTX-AV traces for 13 s
        payback.payback_of(other).record.add_trace(20 * records.TRACE)
    assert seconds_to_pay() == pytest.approx(usual, rel=0.1) and not seconds_to_pay(3.5)  # Flux
    for other in others:
        payback.payback_of(other).record._has_traced = False
        payback.payback_of(other).record.add_trace(records.TRACE / 10)
    assert seconds_to_pay() < usual / 2


def test_the_first_trace_of_a_session_counts_and_of_sessions_the_shortest(flux, engine):
    """What is too large would keep the structure from being traced, and measured, again."""
    records = engine("host.model.structure_record")
    for seconds, expected in ((9.0, 9.0), (2.0, 2.0), (5.0, 2.0)):
        record = records.record_of("a" * 12)
        for of_a_run in (seconds, 1.0, 30.0):  # another size, a batch
            record.add_trace(of_a_run)
        record.keep()
        assert record.trace == expected
        records._records.clear()


def test_lowering_in_the_call_is_not_tracing(flux, engine, monkeypatch):
    """Where no compile process can be started: it is paid once, as the code is kept, and may take minutes."""
    graphs, private = engine("compile.traced_graph"), engine("torch_compat.private")
    clock = [0.0]

    def seconds():
        clock[0] += 1e-3
        return clock[0]

    def lower(graph, _inputs):
        clock[0] += 40.0
        return graph.forward

    for module in (graphs, engine("compile.session")):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=seconds))
    monkeypatch.setattr(private, "lookup_backend", lambda _name: lower)
    flux.cost(1e-9)
    assert flux()[0] == 1
    record, *_ = [record for record in engine("host.model.structure_record")._records.values() if record.runs_now]
    assert 0 < record.trace < 1


def test_what_was_seen_to_be_saved_counts(flux, engine, a_call_takes):
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    network = torch.nn.Linear(1, 1)
    flux.cost(2.0)
    record = payback.payback_of(network).record
    record.seconds, record.runs = 15.0, 10
    engine("messages.recompile_log").watch_of(network).saved = 0.1
    payback.payback_of(network)._calls = 5
    payback.payback_of(network).end_run(network)
    records._records.clear()
    later = payback.Payback(records.Record.recalled(record.structure))
    assert later.record.share == 0.1 and later._runs_to_go(15.0, 10, 1)  # 1.5 s; with SAVED 3 s
    assert not later._runs_to_go(26.0, 10, 1)
    engine("messages.recompile_log").watch_of(network).saved = 0.9
    engine("cuda_graphs.capture").graphs_of(network).replays = 1
    payback.payback_of(network)._calls = 5
    payback.payback_of(network).end_run(network)
    assert record.share == 0.1, "what graphs save is not what compiling saves"


@pytest.mark.parametrize(
    "text", ["", "7", "[]", "[1, 2]", "[1, 2, NaN, 4, 5, 6]", '["a", 1, 1, 1, 1, 1]', "{}", "[null, 1, 1, 1, 1, -1]"]
)
def test_numbers_that_are_damaged_are_none(store, engine, text):
    record = engine("host.model.structure_record").Record
    store.remember("a" * 12, {"payback": text})
    assert record.recalled("a" * 12) == record("a" * 12)


def test_the_user_can_have_it_begin_now_and_in_later_sessions(flux, engine, tiny):
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    flux.cost(1e6)
    graphs, line = flux()
    assert graphs == 0 and payback.payback_of.items()
    assert not payback.begin_now("b" * 12) and not payback.begin_now(["b"])
    assert payback.begin_now(line.begins)
    line = engine("messages.status").lines_of()["7"]
    assert line.says == ["beginsNext"] and line.begins is None
    graphs, line = flux()
    assert graphs == 1 and line.says[0].startswith("ready")
    records._records.clear()
    assert graphs_of(engine, sampled_once(engine, tiny))


def test_no_attention_is_measured_before_compiling_is_decided_on(flux, engine, a_call_takes, monkeypatch):
    asked = []
    choose = engine("host.model.wrapper").with_attention
    monkeypatch.setattr(engine("host.model.wrapper"), "with_attention", lambda *args: asked.append(1) or choose(*args))
    flux.cost(1e6)
    assert flux(steps=20)[0] == 0 and not asked
    flux.cost(0.9)
    assert flux()[0] == 1 and asked


def test_the_users_choice_holds_though_another_server_on_the_store_keeps_its_numbers(flux, engine, monkeypatch):
    records = engine("host.model.structure_record")
    other = records.record_of("a" * 12)
    monkeypatch.setattr(records, "_records", {})
    records.record_of("a" * 12).ask()
    other.seconds = 3.0
    other.keep()
    later = records.Record.recalled("a" * 12)
    assert later.is_decided and not later.is_kept and later.seconds == 3.0


def test_runs_that_wait_for_code_are_counted_and_what_they_traced_is_known(flux, engine, monkeypatch):
    """Not timed: that waits for the GPU. Six sessions without a run would say that a trace never pays."""
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    monkeypatch.setattr(payback.Payback, "_decide", lambda *_: pytest.fail("timed"))
    flux.cost(1e6)
    for _ in range(3):
        assert flux("before first image")[0] == 1
    name = next(name for name, record in records._records.items() if record.runs_now)
    later = records.Record.recalled(name)
    assert (later.sessions, later.session_runs, later.runs, later.is_kept, later.is_decided) == (1, 3, 0, True, False)


def test_a_warmup_is_no_run_of_a_session(flux, engine):
    with engine("messages.recompile_log").warming():
        assert flux("before first image")[0] == 1
    assert not any(record.runs_now for record in engine("host.model.structure_record")._records.values())


def test_only_what_is_not_met_is_waited_for(engine):
    """Runs of this session count as many as usual ones do, though there were fewer."""
    payback, record = engine("host.model.payback"), engine("host.model.structure_record").Record("a" * 12, trace=2.0)
    one = payback.Payback(record)
    assert one._runs_to_go(15.0, 15, 1) == 5  # 0.2 s a run: 20 pay for 4 s; in this session 10 are expected, for 2 s
    record.sessions, record.session_runs = 5, 5
    assert one._runs_to_go(15.0, 15, 1) == 9


def test_runs_are_written_together_on_another_thread(flux, engine, store, monkeypatch):
    """Of a loop over tiles each tile is a run, and the folder may be on a slow network."""
    records, waiting, written = engine("host.model.structure_record"), [], []
    monkeypatch.setattr(records, "call_later", lambda _seconds, write: waiting.append(write))
    monkeypatch.setattr(store, "remember", lambda structure, choices: written.append(choices))
    flux.cost(1e6)
    for number in (1, 2):
        for _ in range(3):
            flux(steps=3)
        assert not written and len(waiting) == 1
        waiting.pop()()
        seconds, runs, *_, session_runs = records.json.loads(written.pop()["payback"])
        assert runs == session_runs == 3 * number and seconds > 0


def test_it_is_written_in_a_while(engine, monkeypatch):
    records, written = engine("host.model.structure_record"), threading.Event()
    monkeypatch.setattr(records, "KEEP_AFTER", 0.01)
    store = types.SimpleNamespace(choices=lambda _structure: {}, remember=lambda *_: written.set())
    monkeypatch.setattr(records, "current", lambda: store)
    records.Record("s" * 12).keep()
    assert written.wait(60)


def test_a_run_after_which_the_gpu_cannot_be_asked_is_not_timed(flux, engine, monkeypatch):
    """The host sees the error of the run, not one of cleaning up."""
    payback = engine("host.model.payback")
    one = payback.Payback(engine("host.model.structure_record").Record("a" * 12), _calls=2, _began={1: 0.0})
    monkeypatch.setattr(one, "_now", unittest.mock.Mock(side_effect=RuntimeError("CUDA error")))
    one.end_run(torch.nn.Linear(1, 1))
    assert (one.record.runs, one.record.runs_now, one._calls) == (0, 1, 0)
