"""A model of the host whose code is made while it samples: every run's image is eager's, and once made the code is used.

From outside: a model is sampled; looked at are its image, the report's counters and its notes.
"""

import functools
import itertools
import logging
import re
import threading
import time

import pytest
import torch
from comfy.ldm.flux import layers
from paging import paged
from patch_kinds import conditions, options
from patch_kinds.weights import load_partly, lora_file
from patching import Runs, patched
from support import compile_settings, relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Behind(Runs):
    """Runs whose code is made in the background; `eager` tells the calls that ran without it since the last time."""

    calls_told = 0
    blocks = ""

    def attach(self, patcher, **settings):
        return super().attach(patcher, **{"compile_when": "in background", "only_blocks": self.blocks, **settings})

    def made(self):
        assert self.engine("background.thread").compiler.wait(120)
        assert not any(model["being_compiled"] for model in self.engine("messages.report").report_json()["models"])

    @property
    def eager(self):
        notes = " ".join(self.engine("host.model.attach").notes_about(self.attach(self.patcher)))
        told = re.search(r"(\d+) calls of the model ran uncompiled so far", notes)
        before, self.calls_told = self.calls_told, int(told[1]) if told else 0
        return self.calls_told - before


@pytest.fixture
def flux(tiny, engine):
    """One kind of block is compiled."""
    runs = Behind(tiny, engine, "flux", cfg=1.0)
    runs.blocks = "single_blocks.*"
    return runs


@pytest.mark.parametrize("compile_when", ["in background", "before first image"])
def test_a_function_of_the_host_is_exchanged_for_one_that_reads_the_step(flux, compile_when, monkeypatch):
    hosts = layers.attention

    def by_step(q, k, v, pe, mask=None, transformer_options={}):  # noqa: B006
        return hosts(q, k, v, pe, mask, transformer_options) * (1 + transformer_options["sigmas"][0])

    plain, compiled = flux.run(flux.patcher), flux.attach(flux.patcher, compile_when=compile_when)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "attention", by_step)
        expected = flux.run(flux.patcher)
    assert relative_error(expected, plain) > 1e-3, "it does nothing; this proves nothing"
    for _ in range(2):
        for image, attention in ((plain, hosts), (expected, by_step)):
            monkeypatch.setattr(layers, "attention", attention)
            for _ in range(2):
                assert relative_error(flux.run(compiled), image) < 1e-5
                flux.made()
    assert flux.graphs == 2 and not flux.failures


@pytest.mark.parametrize("name", ["flux", "sdxl", pytest.param("wan", marks=pytest.mark.rest)])
def test_images_go_on_until_the_code_is_there(name, tiny, engine):
    runs = Behind(tiny, engine, name)
    expected = runs.run(runs.patcher)
    compiled = runs.attach(runs.patcher)
    assert relative_error(runs.run(compiled), expected) < 1e-5 and runs.eager > 0
    runs.made()
    graphs = runs.graphs
    assert graphs == len(runs.groups) > 0 and not runs.failures
    for _ in range(2):
        assert relative_error(runs.run(compiled), expected) < 1e-5 and runs.eager == 0
    other = tiny.empty_latent(name, 96, 64)
    before, runs.latent = runs.latent, other
    expected = runs.run(runs.patcher)
    assert relative_error(runs.run(compiled), expected) < 1e-5 and runs.eager == 0, "one code for all sizes"
    runs.latent = before
    runs.made()
    assert runs.graphs == graphs


def test_a_step_in_which_one_kind_has_code_and_another_waits_for_it_is_compared_with_none(tiny, engine, monkeypatch):
    """As an uncompiled step it would make compiled ones seem to save little, and after a restart nothing would be compiled."""
    flux, may_go_on = Behind(tiny, engine, "flux", cfg=1.0), threading.Event()
    compiled, code = flux.attach(flux.patcher), engine("compile.registry").code_of(flux.patcher.model.diffusion_model)
    lowerers, steps = engine("compile.traced_graph").LOWERERS, 2
    lower = lowerers["eager"]

    def one_kind(request, block, patient):
        assert block != "SingleStreamBlock" or may_go_on.wait(120)
        return lower(request, block, patient)

    monkeypatch.setitem(lowerers, "eager", one_kind)
    try:
        flux.run(compiled)
        double = next(group.code for group in flux.groups if group.class_name == "DoubleStreamBlock")
        while double.is_being_lowered:
            time.sleep(0.05)
        assert code.eager_calls == steps
        before = code.mixed
        flux.run(compiled)
        assert code.eager_calls == 2 * steps and code.mixed == before + steps
    finally:
        may_go_on.set()
    flux.made()
    flux.run(compiled)
    assert code.eager_calls == 2 * steps and code.mixed == before + steps


def test_blocks_of_a_kind_whose_last_one_is_skipped_are_compiled_all_the_same(flux):
    last = len(flux.patcher.model.diffusion_model.single_blocks) - 1

    def skipping(patcher):
        patcher.set_model_patch_replace(lambda args, _more: {"img": args["img"]}, "dit", "single_block", last)
        return patcher

    expected = flux.run(patched(flux.patcher, skipping))
    assert relative_error(expected, flux.plain()) > 1e-3, "nothing is skipped; this proves nothing"
    compiled = patched(flux.attach(flux.patcher), skipping)
    assert relative_error(flux.run(compiled), expected) < 1e-5
    flux.made()
    assert flux.graphs == 1 and flux.eager > 0
    assert relative_error(flux.run(compiled), expected) < 1e-5 and flux.eager == 0


@pytest.mark.parametrize("compile_when", ["in background", "before first image"])
def test_what_packs_have_put_around_the_forward_of_a_class_runs_around_its_code(flux, compile_when, monkeypatch):
    noted, plain = [], flux.plain()

    def noting(function, factor):
        @functools.wraps(function)
        def forward(self, *args, **kwargs):
            noted.append(kwargs["transformer_options"]["sigmas"])
            return function(self, *args, **kwargs) * factor

        return forward

    kind = layers.SingleStreamBlock
    for factor in (1.1, 0.8):
        monkeypatch.setattr(kind, "forward", noting(kind.forward, factor))
    expected = flux.run(flux.patcher)
    assert relative_error(expected, plain) > 1e-3
    calls, compiled = len(noted), flux.attach(flux.patcher, compile_when=compile_when)
    for run in (1, 2, 3):
        assert relative_error(flux.run(compiled), expected) < 1e-5 and len(noted) == calls * (run + 1)
        flux.made()
    assert flux.graphs == 1 and not flux.failures
    monkeypatch.undo()
    assert relative_error(flux.run(compiled), plain) < 1e-5


def test_a_forward_that_calls_the_hosts_at_times_is_told(flux, engine, monkeypatch):
    """By two ways, and in some runs not at all."""
    kind, uses_own = layers.SingleStreamBlock, []
    hosts = kind.forward

    def direct(self, *args, **kwargs):
        return hosts(self, *args, **kwargs)

    def forward(self, img, *args, **kwargs):
        forward.calls += 1  # it names itself
        if uses_own:
            return img * 0.9
        return (direct if self is network.single_blocks[0] else hosts)(self, img, *args, **kwargs)

    forward.calls = 0

    network = flux.patcher.model.diffusion_model
    plain, compiled = flux.plain(), flux.attach(flux.patcher, compile_when="before first image")
    monkeypatch.setattr(kind, "forward", forward)
    assert relative_error(flux.run(compiled), plain) < 1e-5 and flux.graphs == 1 and not flux.failures and flux.eager == 0
    assert forward.calls == flux.steps * len(network.single_blocks)
    uses_own.append(True)
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(compiled), expected) < 1e-5 and flux.eager > 0
    assert [failure for failure in flux.failures if "replaced its forward" in failure]
    uses_own.clear()
    assert relative_error(flux.run(compiled), plain) < 1e-5 and flux.eager == 0 and not flux.failures


def test_a_patched_model_gets_code_around_the_patch_and_the_plain_one_keeps_its(flux):
    change = options.patched_with(options.scaled_output, "attn1_output_patch")
    compiled, expected = flux.attach(flux.patcher), flux.run(patched(flux.patcher, change))
    flux.run(compiled)
    flux.made()
    assert flux.graphs == 1 and flux.eager > 0
    for waits in (True, False):
        assert relative_error(flux.run(patched(compiled, change)), expected) < 1e-5
        flux.made()
        assert flux.graphs == 3 and (flux.eager > 0) == waits
    assert relative_error(flux.run(compiled), flux.plain()) < 1e-5
    flux.made()
    assert flux.graphs == 3 and flux.eager == 0 and not flux.failures


def test_a_prompt_of_another_length_needs_no_code_of_its_own(flux):
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    flux.made()
    assert flux.eager > 0
    longer = conditions.other_prompt(flux, tokens=60)
    assert relative_error(flux.run(compiled, longer), flux.run(flux.patcher, longer)) < 1e-5
    flux.made()
    assert flux.graphs == 1 and flux.eager == 0


def test_the_page_is_told_how_it_goes(tiny, engine, monkeypatch):
    flux = Behind(tiny, engine, "flux", cfg=1.0, steps=8)
    status, told = flux.engine("messages.status"), []
    monkeypatch.setattr(status, "listeners", [lambda *news: told.append(news)])
    expected = flux.run(flux.patcher)
    settings = flux.engine("settings").CompileSettings(backend="eager", compile_when="in background")
    compiled = flux.engine("host.model.attach").attach(flux.patcher, settings, "12")
    assert relative_error(flux.run(compiled), expected) < 1e-5
    flux.made()
    flux.run(compiled)
    lines = [line for _owner, node, line in told if node == "12"]
    assert [state for state, _ in itertools.groupby(line.state for line in lines if line.state)][:2] == ["compiling", "ready"]
    said = [line.says for line in lines]
    assert ["forSeconds", ["preparing"]] in said and ["forSeconds", ["compilingKinds", 2]] in said
    key, *steps = status.lines_of()["12"].says
    # Code may be there before a step ran eager.
    assert key == "readyBut" and steps[0][0] in ("aStep", "noDifference", "faster", "slower")


def test_uncompiled_steps_of_shorter_prompts_are_compared_with_but_not_those_of_smaller_images(flux, tiny, monkeypatch):
    status, given = flux.engine("messages.status"), []
    monkeypatch.setattr(status.Status, "begins", lambda _self, _network, _step, inputs: given.append(inputs))
    settings = flux.engine("settings").CompileSettings(backend="eager")
    compiled = flux.engine("host.model.attach").attach(flux.patcher, settings, "14")
    for size, tokens in ((64, 40), (64, 60), (128, 60)):
        flux.latent = tiny.empty_latent("flux", size, size)
        flux.run(compiled, conditions.other_prompt(flux, tokens=tokens))
    shorter, longer, larger = dict.fromkeys(given)
    assert status._is_at_most(shorter, longer) and not status._is_at_most(longer, shorter)
    assert not status._is_at_most(longer, larger)
    flux.made()


def test_on_a_cpu_steps_beside_the_compiler_are_not_what_compiled_ones_are_compared_with(tiny, engine):
    flux, goes_on = Behind(tiny, engine, "flux", cfg=1.0, steps=8), threading.Event()

    def backend(graph, _inputs):
        goes_on.wait(100)
        return graph.forward

    settings = compile_settings(engine, backend=backend, compile_when="in background")
    compiled = engine("host.model.attach").attach(flux.patcher, settings, "13")
    flux.run(compiled)
    goes_on.set()
    for _ in range(2):
        flux.made()
        flux.run(compiled)
    flux.made()
    key, (what, *_) = engine("messages.status").lines_of()["13"].says
    assert (key, what) == ("readyBut", "aStep"), "a compiler slows uncompiled steps down"


def test_a_cancelled_call_leaves_no_line_of_before(tiny, engine, monkeypatch):
    """At once, in the middle of compiling."""
    import comfy.model_management

    flux = Behind(tiny, engine, "flux", cfg=1.0, steps=2)
    status, told = engine("messages.status"), []
    monkeypatch.setattr(status, "listeners", [lambda *news: told.append(news)])
    settings = engine("settings").CompileSettings(backend="eager", compile_when="before first image")
    compiled = engine("host.model.attach").attach(flux.patcher, settings, "13")
    network = compiled.model.diffusion_model

    def cancelled(*_):
        raise comfy.model_management.InterruptProcessingException

    monkeypatch.setattr(network.final_layer, "forward", cancelled)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        flux.run(compiled)
    assert told[0][2].state == "compiling" and told[-1][2].state == "ready"


def test_no_thread_where_the_hosts_memory_manager_bears_none(flux, monkeypatch):
    """comfy-aimdo with `--verbose DEBUG`, see adapter.py."""
    monkeypatch.setattr(flux.engine("host.adapter"), "makes_room", lambda: True)
    compiled = flux.attach(flux.patcher)
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        flux.run(compiled)
    finally:
        logging.getLogger().setLevel(logging.WARNING)
    assert flux.eager == 0 and flux.graphs == len(flux.groups) > 0
    assert any("--verbose DEBUG" in text for text in flux.engine("host.model.attach").notes_about(compiled))


def test_a_lora_needs_no_code_of_its_own_wherever_the_weights_are(flux, monkeypatch):
    import comfy.sd

    patched, _ = comfy.sd.load_lora_for_models(flux.patcher, None, lora_file(flux.patcher), 1.0, 0)
    expected = flux.run(patched)
    flux.run(flux.attach(flux.patcher))
    flux.made()
    assert flux.graphs == 1 and flux.eager > 0
    for share in (1.0, 0.5, 0.0):
        if share < 1:
            load_partly(flux.patcher, share)
        assert relative_error(flux.run(flux.attach(patched)), expected) < 1e-5
        flux.made()
        assert flux.graphs == 1 and flux.eager == 0, share


def test_paged_weights_are_not_held_and_need_the_same_code(flux, monkeypatch):
    expected = flux.run(flux.patcher)
    compiled = flux.attach(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        names = list(pages.layers)
        for resident in ([], names[::2], names):
            pages.resident = set(resident)
            assert relative_error(flux.run(compiled), expected) < 1e-6
            flux.made()
            assert pages.pinned == 0
    assert flux.graphs == 1 and not flux.failures
    assert 1 <= flux.eager <= flux.steps, "the first run alone"


def test_the_warmup_waits_and_leaves_nothing_to_make(flux, engine):
    compiled = flux.attach(flux.patcher)
    size = engine("host.nodes.warmup_plan").Size
    report = engine("host.nodes.warmup").warm_up(compiled, flux.positive, flux.negative, 1.0, [size(64, 64, 1, 1)])
    assert "1 graph compiled" in report
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(compiled), expected) < 1e-5
    flux.made()
    assert flux.eager == 0 and flux.graphs == 1


def test_noise_that_is_drawn_meanwhile_is_the_samplers(flux, engine):
    """An ancestral sampler draws from PyTorch's own generator in each step."""
    compiler = engine("background.thread").compiler

    def drawn(patcher):
        torch.manual_seed(3)
        flux.run(patcher)
        return torch.randn(8)

    plain = drawn(flux.patcher)
    assert torch.equal(drawn(flux.attach(flux.patcher)), plain)
    assert compiler.wait(120)
    assert torch.equal(drawn(flux.attach(flux.patcher)), plain)
