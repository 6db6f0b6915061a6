"""A compilation during real work is noticed and explained, once; none happens after a fitting warmup."""

import logging

import pytest
import torch
from patching import Runs
from test_host_models import sample

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Watched(Runs):
    """A warmed model whose runs return what the log said."""

    def __init__(self, tiny, engine, caplog, name="flux", cfg=1.0, **settings):
        super().__init__(tiny, engine, name, cfg=cfg)
        self.tiny, self.name, self.caplog = tiny, name, caplog
        self.compiled = self.attach(self.patcher, **{"dynamic": "false", **settings})

    def warm(self, *sizes):
        sizes = [self.engine("warmup_plan").Size(*size) for size in sizes or [(64, 64)]]
        return self.engine("host.warmup").warm_up(self.compiled, self.positive, self.negative, self.cfg, sizes)

    def said(self, width=64, height=64, batch=1, tokens=None, cfg=None, patcher=None, seed=3):
        positive, negative = self.tiny.conditioning(self.name, tokens) if tokens else (self.positive, self.negative)
        latent = self.tiny.empty_latent(self.name, width, height, batch_size=batch)
        self.caplog.clear()
        with self.caplog.at_level(logging.WARNING, "torch-compile-kit"):
            sample(patcher or self.compiled, (positive, negative), latent, cfg or self.cfg, seed=seed)
        return [r.getMessage() for r in self.caplog.records if r.name == "torch-compile-kit"]


@pytest.fixture
def watched(tiny, engine, caplog):
    return lambda *args, **kwargs: Watched(tiny, engine, caplog, *args, **kwargs)


def test_a_warmed_size_says_nothing(watched):
    runs = watched()
    report = runs.warm((64, 64), (96, 64), (64, 64, 1, 2))
    assert "64x64 batch 1" in report and "96x64 batch 1" in report
    for size in ({}, {"width": 96}, {"batch": 2}, {"seed": 9}, {"width": 96, "seed": 10}):
        assert runs.said(**size) == []


def test_without_a_warmup_the_first_run_names_the_node(watched):
    (sentence,) = watched().said()
    assert "the first run" in sentence and "Torch Compile Warmup" in sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 96}, ["width changed from 64 to 96", "Add 96x64 to extra_sizes", "dynamic to true"]),
        ({"height": 128}, ["height changed from 64 to 128", "64x128"]),
        ({"batch": 2}, ["batch changed from 1 to 2", "64x64 batch 2"]),
        ({"tokens": 40}, ["prompt's length changed from 24 to 40", "longest prompt"]),
    ],
)
def test_each_cause_has_its_sentence_once(watched, change, words):
    runs = watched()
    runs.warm()
    (sentence,) = runs.said(**change)
    assert all(word in sentence for word in words), sentence
    assert runs.said(**change, seed=4) == []


def test_cfg_above_one_is_a_batch_of_two(watched):
    runs = watched("sdxl", cfg=1.0)
    runs.warm()
    (sentence,) = runs.said(cfg=5.0)
    assert "batch changed from 1 to 2" in sentence and "cfg" in sentence


def test_a_patch_is_named(watched):
    runs = watched()
    runs.warm()
    patched = runs.compiled.clone()
    patched.set_model_attn1_output_patch(lambda out, _options: out * 0.5)
    (sentence,) = runs.said(patcher=patched)
    assert "patches of the model changed (attn1_output_patch)" in sentence


def test_a_second_setting_of_the_same_model_is_watched_by_itself(watched):
    runs = watched()
    runs.warm()
    other = runs.attach(runs.patcher, dynamic="false", cache_limit=7)
    (sentence,) = runs.said(patcher=other)
    assert sentence.startswith("Flux: 2 graphs compiled while sampling")


def test_the_page_is_told(watched, engine):
    heard = []
    engine("watch").listeners.append(lambda name, sentence: heard.append((name, sentence)))
    try:
        runs = watched()
        runs.warm()
        runs.said(width=96)
    finally:
        engine("watch").listeners.pop()
    assert [name for name, _ in heard] == ["Flux"] and "width changed" in heard[0][1]


def test_many_runs_after_one_warmup_add_nothing(watched):
    runs = watched(dynamic="auto")
    runs.warm((64, 64), (96, 64), (64, 64, 1, 2))
    before = runs.graphs
    for seed in range(10):
        assert runs.said(seed=seed) == []
    for tokens in (5, 77, 200, 400):
        assert runs.said(tokens=tokens) == []
    for sampler, scheduler in (
        ("euler", "normal"),
        ("dpmpp_2m", "karras"),
        ("heun", "simple"),
        ("lms", "normal"),
        ("ddim", "simple"),
    ):
        sample(runs.compiled, (runs.positive, runs.negative), runs.latent, 1.0, 1, sampler=sampler, scheduler=scheduler)
    assert runs.graphs == before
    assert torch.isfinite(runs.run(runs.compiled)).all()
