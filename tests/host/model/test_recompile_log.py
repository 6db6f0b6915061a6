"""A compilation during real work is noticed and explained, once; none happens after a fitting warmup."""

import logging

import pytest
import torch
from patching import Runs
from sampling import sample

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# One kind of block is enough where the sentence is what is looked at.
SINGLE = {"only_blocks": "single_blocks.*"}


class Watched(Runs):
    """A warmed model whose runs return what the log said. The backend traces only."""

    def __init__(self, tiny, engine, caplog, name="flux", cfg=1.0, **settings):
        super().__init__(tiny, engine, name, cfg=cfg)
        self.tiny, self.name, self.caplog = tiny, name, caplog
        self.compiled = self.attach(self.patcher, **{"dynamic": "false", **settings})

    def warm(self, *sizes, patcher=None, positive=None, negative=None):
        sizes = [self.engine("host.nodes.warmup_plan").Size(*size) for size in sizes or [(64, 64)]]
        conditioning = positive or self.positive, negative or self.negative
        return self.engine("host.nodes.warmup").warm_up(patcher or self.compiled, *conditioning, self.cfg, sizes)

    def said(self, width=64, height=64, length=1, batch=1, tokens=None, cfg=None, patcher=None, positive=None, seed=3):
        prompts = self.tiny.conditioning(self.name, tokens) if tokens else (positive or self.positive, self.negative)
        latent = self.tiny.empty_latent(self.name, width, height, length, batch)
        self.caplog.clear()
        with self.caplog.at_level(logging.WARNING, "torch-compile-kit"):
            sample(patcher or self.compiled, prompts, latent, cfg or self.cfg, seed=seed)
        return [r.getMessage() for r in self.caplog.records if r.name == "torch-compile-kit"]


@pytest.fixture
def watched(tiny, engine, caplog):
    return lambda *args, **kwargs: Watched(tiny, engine, caplog, *args, **kwargs)


def test_a_warmed_size_says_nothing(watched):
    runs = watched(**SINGLE)
    report = runs.warm((64, 64), (96, 64), (64, 64, 1, 2))
    assert "64x64 batch 1" in report and "96x64 batch 1" in report
    for size in ({}, {"width": 96}, {"batch": 2}, {"seed": 9}, {"width": 96, "seed": 10}):
        assert runs.said(**size) == []


CAUSES = [
    ({"width": 96}, ["width changed from 64 to 96", "Add 96x64 to extra_sizes", "dynamic to true"]),
    ({"height": 112}, ["height changed from 64 to 112", "64x112"]),
    ({"batch": 2}, ["batch changed from 1 to 2", "64x64 batch 2"]),
    ({"tokens": 40}, ["prompt's length changed from 24 to 40", "dynamic to auto", "connect a prompt of that length"]),
]


def test_each_cause_has_its_sentence_once(watched):
    runs = watched(**SINGLE)
    runs.warm()
    for change, words in CAUSES:
        (sentence,) = runs.said(**change)
        assert all(word in sentence for word in words), sentence
        assert runs.said(**change, seed=4) == []


@pytest.mark.parametrize(
    ("name", "size", "change", "words"),
    [
        ("wan", (64, 64, 5), {"length": 9}, "length changed from 5 to 9. Add 64x64x9 to extra_sizes"),
        ("sdxl", (64, 64), {"cfg": 5.0}, "2 prompts ran in one batch, not 1"),
    ],
)
def test_causes_of_other_models(watched, name, size, change, words):
    runs = watched(name)
    runs.warm(size)
    (sentence,) = runs.said(**change)
    assert words in sentence and runs.said(**change, seed=4) == []


def test_a_lora_in_bypass_mode_is_named(watched):
    import comfy.sd
    from patch_kinds.weights import lora_file

    runs = watched()
    runs.warm()
    merged = comfy.sd.load_lora_for_models(runs.compiled, None, lora_file(runs.patcher), 1.0, 0)[0]
    assert runs.said(patcher=merged) == []
    beside = comfy.sd.load_bypass_lora_for_models(runs.compiled, None, lora_file(runs.patcher), 1.0, 0)[0]
    sentences = runs.said(patcher=beside)
    assert sentences and all("layers of the model were exchanged" in s and "bypass" in s for s in sentences), sentences


def test_an_input_that_the_conditioning_adds_is_named(watched):
    runs = watched(**SINGLE)
    runs.warm()
    reference = [[text, {**options, "reference_latents": [torch.zeros(1, 16, 8, 8)]}] for text, options in runs.positive]
    (sentence,) = runs.said(positive=reference)
    assert "conditioning changed: ref_latents was added" in sentence and "the conditioning that the sampler gets" in sentence


def test_notices_come_back_in_the_next_report_and_as_json(watched, engine):
    runs = watched(**SINGLE)
    runs.warm()
    (sentence,) = runs.said(width=96)
    notice = sentence.removeprefix("Flux: ")
    assert f"Compiled outside the warmup: {notice}" in runs.warm()
    entries = [m for m in engine("messages.report").report_json()["models"] if notice in m["compiled_outside_warmup"]]
    assert [m["compiled_outside_warmup"] for m in entries] == [[notice]]
    assert [m["blocks"] for m in entries] == [len(runs.patcher.model.diffusion_model.single_blocks)]
    assert "Compiled outside" not in runs.warm((64, 64), (96, 64)), "solved: that size is warm now"


def test_a_patch_is_named(watched):
    runs = watched(**SINGLE)
    runs.warm()
    patched = runs.compiled.clone()
    patched.set_model_attn1_output_patch(lambda out, _options: out * 0.5)
    (sentence,) = runs.said(patcher=patched)
    assert "patches of the model changed (attn1_output_patch)" in sentence


def test_a_second_setting_of_the_same_model_is_watched_by_itself(watched):
    runs = watched(**SINGLE)
    runs.warm()
    other = runs.attach(runs.patcher, dynamic="false", cache_limit=7, **SINGLE)
    (sentence,) = runs.said(patcher=other)
    assert sentence.startswith("Flux: Waited ") and "these settings of Torch Compile" in sentence
    (sentence,) = runs.said(patcher=other, width=96)
    assert "width changed from 64 to 96" in sentence
    runs.said(width=96)
    (sentence,) = runs.said(patcher=runs.attach(runs.patcher, dynamic="false", cache_limit=9, **SINGLE), width=96)
    assert "these settings" in sentence, "what is known is known of other code"


def test_the_page_is_told(watched, engine):
    heard = []
    engine("messages.recompile_log").listeners.append(lambda *told: heard.append(told))
    try:
        runs = watched(**SINGLE)
        runs.warm()
        runs.said(width=96)
    finally:
        engine("messages.recompile_log").listeners.pop()
    ((name, sentence, size, node),) = heard
    assert node is None and name == "Flux" and "width changed" in sentence and size == "96x64"


def test_many_runs_after_one_warmup_add_nothing(watched):
    runs = watched(dynamic="auto", **SINGLE)
    runs.warm((64, 64), (96, 64), (64, 64, 1, 2))
    before = runs.graphs
    for seed in range(3):
        assert runs.said(seed=seed) == []
    for tokens in (5, 400):
        assert runs.said(tokens=tokens) == []
    for sampler, scheduler in (("dpmpp_2m", "karras"), ("heun", "simple"), ("lms", "normal")):
        sample(runs.compiled, (runs.positive, runs.negative), runs.latent, 1.0, 1, sampler=sampler, scheduler=scheduler)
    assert runs.graphs == before
    assert torch.isfinite(runs.run(runs.compiled)).all()
