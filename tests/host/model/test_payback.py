"""Compiling is put off where it would take longer than it saves."""

import gc
import types

import pytest
import torch
from sampling import sample

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def store(engine, monkeypatch, tmp_path):
    code_store = engine("cache.code_store")
    store = code_store.CodeStore(tmp_path, 2**30, code_store.read_key(tmp_path))
    monkeypatch.setattr(code_store._Current, "opened", True)
    monkeypatch.setattr(code_store._Current, "store", store)
    return store


@pytest.fixture
def flux(engine, tiny, monkeypatch, store):
    """run(compile) samples five steps as on a GPU, and gives the latent, the graphs so far and the line of the node."""
    payback, attachment = engine("host.model.payback"), engine("host.model.attach")
    monkeypatch.setattr(payback, "may_wait", lambda _device: True)
    monkeypatch.setattr(payback, "_freed", {})
    patcher, latent, conditioning = tiny.build_patcher("flux"), tiny.empty_latent("flux"), tiny.conditioning("flux")
    expected = sample(patcher, conditioning, latent, 1.0, seed=1, steps=5)
    network = patcher.model.diffusion_model

    def run(compile_when="in background", steps=5, sampler="euler"):
        settings = engine("settings").CompileSettings(backend="eager", compile_when=compile_when)
        model = attachment.attach(patcher, settings, node="7")
        result = sample(model, conditioning, latent, 1.0, seed=1, steps=steps, sampler=sampler)
        assert engine("background.thread").compiler.wait(60)
        assert (steps, sampler) != (5, "euler") or torch.allclose(result, expected, atol=1e-4)
        groups = engine("compile.registry").code_of(network).groups.values()
        line = next(iter(engine("notices.status").lines_of().values()))
        return sum(group.stats.graphs for group in groups), line, attachment.notes_about(model)

    run.conditioning = conditioning
    run.cost = lambda seconds: monkeypatch.setattr(payback, "COST", seconds)
    return run


def test_what_would_not_pay_back_runs_as_without_this_pack_and_says_so(flux):
    flux.cost(1e6)
    for _ in range(2):
        graphs, line, notes = flux()
        assert graphs == 0 and line.says[0] == "putOff" and line.says[1] > 1000 and line.state == "unclear"
        assert any(note.startswith("Not compiled so far") for note in notes) and not any("ran uncompiled" in n for n in notes)


def test_it_compiles_as_soon_as_it_would_pay_back(flux):
    """Also in the middle of a run: a longer one."""
    flux.cost(1e6)
    assert flux()[0] == 0
    flux.cost(0.0)
    graphs, line, notes = flux()
    assert graphs == 2 and line.says[0].startswith("ready") and not any(note.startswith("Not compiled") for note in notes)


@pytest.fixture
def a_call_takes(monkeypatch, engine):
    """A list with the seconds of each call of the sampler from now on."""
    payback, seconds, of_a_call = engine("host.model.payback"), [0.0], [0.1]
    monkeypatch.setattr(payback, "time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    step = payback.Payback._measure

    def later(self, *args):
        seconds[0] += of_a_call[0]
        step(self, *args)

    monkeypatch.setattr(payback.Payback, "_measure", later)
    return of_a_call


def test_the_compiler_is_imported_when_it_is_likely(flux, engine, monkeypatch):
    """It slows the first image, which few steps may never get back."""
    asked = []
    monkeypatch.setattr(engine("host.model.payback"), "import_ahead", lambda: asked.append(True))
    flux.cost(1e6)
    assert flux(steps=14)[0] == 0 and not asked
    assert flux(steps=15)[0] == 0 and asked


def test_one_large_prompt_is_no_reason_to_compile(flux, a_call_takes):
    flux.cost(2.0)
    for a_call_takes[0] in (0.1, 1.0):  # 1 s saved in ten prompts, 10 s
        assert flux()[0] == 0


def test_a_preview_of_few_steps_does_not_put_off_longer_prompts(flux, a_call_takes):
    flux.cost(0.75)
    assert flux(steps=3)[0] == 0  # 0.6 s saved in ten prompts
    assert flux(steps=5)[0] == 2  # 0.8 s in ten of each kind


def test_one_large_batch_among_small_ones_is_no_reason_to_compile(flux, a_call_takes):
    """Z-Image on an H100: a batch of two, once in a session of 13 prompts, made that session longer."""
    flux.cost(1.0)
    for steps in (3, 3, 3, 5):
        assert flux(steps=steps)[0] == 0  # 0.7 s in ten prompts, and 1 s in ten of the largest
    assert [flux(steps=5)[0] for _ in range(9)][-1] == 2


def test_calls_of_samplers_that_call_the_model_twice_a_step_are_counted(flux, a_call_takes):
    flux.cost(1.5)
    assert flux(sampler="heun")[0] == 0  # 1 s saved in ten prompts, as far as can be told from the first calls
    assert flux(sampler="heun")[0] == 2  # 1.8 s


def test_what_unets_cost_is_counted_in_calls(flux, engine, a_call_takes, monkeypatch):
    """On a machine on which calls are slow compiling is too; and no attention is measured for a few steps."""
    payback, asked = engine("host.model.payback"), []
    monkeypatch.setattr(payback, "has_convolutions", lambda _network: True)
    choose = engine("host.model.wrapper").with_attention
    monkeypatch.setattr(engine("host.model.wrapper"), "with_attention", lambda *args: asked.append(1) or choose(*args))
    flux.cost(0.0)
    assert flux(steps=5)[0] == 0 and not asked  # saves 20 calls in ten prompts, and costs 60
    assert flux(steps=30)[0] == 2 and asked


def test_the_shortest_call_counts(flux, engine, a_call_takes, monkeypatch):
    """What is measured and made ready in the first prompt slows some of its calls."""
    calls = engine("host.model.payback").Payback
    measure = calls._measure

    def uneven(self, *args):
        a_call_takes[0] = 9.0 if self._calls == 3 else 0.1
        measure(self, *args)

    monkeypatch.setattr(calls, "_measure", uneven)
    flux.cost(2.0)
    assert flux()[0] == 0


def test_a_batch_that_changes_in_the_first_steps_ends_no_prompt(flux):
    """A part of the prompt that begins later (ConditioningSetTimestepRange)."""
    flux.cost(1e6)
    (embedding, about), *_ = flux.conditioning[0]
    flux.conditioning[0].append([embedding * 0.5, {**about, "start_percent": 0.3, "end_percent": 1.0}])
    for steps in (4, 6):
        assert flux(steps=steps)[0] == 0


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_few_steps_are_measured_too(flux, steps):
    flux.cost(0.0)
    flux(steps=steps)
    assert flux(steps=steps)[0] == 2


def test_who_waits_for_code_gets_it_and_others_use_it(flux):
    flux.cost(1e6)
    assert flux("before first image")[0] == 2
    graphs, line, _ = flux()
    assert graphs == 2 and line.says[0].startswith("ready")


def test_prompts_are_counted_though_the_model_is_freed_after_each(flux, engine, tiny, a_call_takes, monkeypatch):
    """As under --cache-none: each prompt loads the model, which was new to this pack each time."""
    payback = engine("host.model.payback")
    flux.cost(1.5)  # 1 s is saved in ten prompts, 1.6 s in sixteen
    counts = []
    for seed in range(16):
        patcher, latent = tiny.build_patcher("flux"), tiny.empty_latent("flux")
        settings = engine("settings").CompileSettings(backend="eager", compile_when="in background")
        model = engine("host.model.attach").attach(patcher, settings, node="7")
        sample(model, tiny.conditioning("flux"), latent, 1.0, seed=seed, steps=5)
        counts.append(payback.payback_of(patcher.model.diffusion_model).prompts)
        assert engine("background.thread").compiler.wait(60)
        compiled = payback.payback_of(patcher.model.diffusion_model)._is_decided
        del patcher, model
        gc.collect()
    assert counts == list(range(1, 17)) and compiled


def test_two_models_of_one_structure_are_counted_apart_while_both_live(flux, engine, tiny):
    """Wan 2.2 samples with two."""
    payback_of = engine("host.model.payback").payback_of
    one, other = (tiny.build_patcher("flux").model.diffusion_model for _ in range(2))
    payback_of(one).new_run()
    assert payback_of(other).prompts == 0


def test_what_was_decided_on_compiles_from_the_first_prompt_of_the_next_session(flux, engine, tiny, a_call_takes, store):
    flux.cost(0.0)
    assert flux()[0] == 2
    flux.cost(1e6)
    for expected in (True, False):
        patcher, latent = tiny.build_patcher("flux"), tiny.empty_latent("flux")
        settings = engine("settings").CompileSettings(backend="eager", compile_when="in background")
        sample(engine("host.model.attach").attach(patcher, settings), tiny.conditioning("flux"), latent, 1.0, seed=1, steps=5)
        assert engine("background.thread").compiler.wait(60)
        groups = engine("compile.registry").code_of(patcher.model.diffusion_model).groups.values()
        assert bool(sum(group.stats.graphs for group in groups)) is expected
        del patcher, groups
        gc.collect()
        engine("host.model.payback")._freed.clear()
        store.clear()


def test_no_attention_is_measured_for_few_steps_that_may_never_be_compiled(flux, engine, a_call_takes, monkeypatch):
    asked = []
    choose = engine("host.model.wrapper").with_attention
    monkeypatch.setattr(engine("host.model.wrapper"), "with_attention", lambda *args: asked.append(1) or choose(*args))
    flux.cost(1e6)
    assert flux()[0] == 0 and not asked
    flux.cost(0.0)
    assert flux()[0] == 2 and asked
