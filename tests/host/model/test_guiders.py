"""Ways of sampling beyond KSampler, with the host's own nodes: each equals eager, and adds no graph after it has run once."""

import functools
import importlib

import pytest
import torch
from patching import Runs, same
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def node(module, name):
    return getattr(importlib.import_module(f"comfy_extras.nodes_{module}"), name)


def sampled(runs, guider, sampler="euler", steps=3):
    """As SamplerCustomAdvanced does it."""
    import comfy.samplers

    custom = node("custom_sampler", "SamplerCustomAdvanced")
    noise = node("custom_sampler", "RandomNoise").execute(1).result[0]
    sampling = runs.patcher.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    found = custom.execute(noise, guider, comfy.samplers.sampler_object(sampler), sigmas, {"samples": runs.latent})
    return found.result[0]["samples"]


def basic(runs, patcher, sampler="euler"):
    return sampled(runs, node("custom_sampler", "BasicGuider").execute(patcher, runs.positive).result[0], sampler)


def cfg(runs, patcher, sampler="euler"):
    guider = node("custom_sampler", "CFGGuider").execute(patcher, runs.positive, runs.negative, 3.0)
    return sampled(runs, guider.result[0], sampler)


def dual_cfg(runs, patcher, style):
    second, _ = runs.tiny.conditioning(runs.name, seed=7)
    guider = node("custom_sampler", "DualCFGGuider").execute(patcher, runs.positive, second, runs.negative, 4.0, 3.0, style)
    return sampled(runs, guider.result[0])


def perp_neg(runs, patcher):
    empty, _ = runs.tiny.conditioning(runs.name, seed=8)
    guider = node("perpneg", "PerpNegGuider").execute(patcher, runs.positive, runs.negative, empty, 4.0, 1.0)
    return sampled(runs, guider.result[0])


def patched(module, name, *args, **kwargs):
    """KSampler behind a node that changes the guidance."""

    def run_patched(runs, patcher):
        found = node(module, name).execute(patcher, *args, **kwargs)
        return runs.run(getattr(found, "result", found)[0])

    return run_patched


def two_passes(runs, patcher):
    """An upscaler's second pass, over half of the noise."""
    import comfy.utils

    import nodes

    first = runs.run(patcher)
    larger = comfy.utils.common_upscale(first, first.shape[-1] * 2, first.shape[-2] * 2, "bilinear", "disabled")
    inputs = (patcher, 2, 4, runs.cfg, "euler", "simple", runs.positive, runs.negative, {"samples": larger})
    return nodes.common_ksampler(*inputs, denoise=0.5)[0]["samples"]


# what it is called -> (tiny model, how it samples)
WAYS = {
    "BasicGuider": ("flux", basic),
    "heun": ("flux", lambda runs, patcher: cfg(runs, patcher, "heun")),
    "dpmpp_2m_sde": ("sdxl", lambda runs, patcher: cfg(runs, patcher, "dpmpp_2m_sde")),
    "uni_pc": ("flux", lambda runs, patcher: cfg(runs, patcher, "uni_pc")),
    "Dual CFG": ("flux", lambda runs, patcher: dual_cfg(runs, patcher, "regular")),
    "Dual CFG, nested": ("sdxl", lambda runs, patcher: dual_cfg(runs, patcher, "nested")),
    "Perp-Neg": ("sdxl", perp_neg),
    "skip layers": ("sd3", patched("slg", "SkipLayerGuidanceDiT", 3.0, 0.0, 1.0, "1", "")),
    "perturbed attention": ("sdxl", patched("pag", "PerturbedAttentionGuidance", 3.0)),
    "self-attention": ("sdxl", patched("sag", "SelfAttentionGuidance", 0.5, 2.0)),
    "normalized attention": ("flux", patched("nag", "NAGuidance", 5.0, 0.5, 1.5)),
    "two passes": ("flux", two_passes),
    "HyperTile": ("sdxl", patched("hypertile", "HyperTile", 32, 2, 2, False)),
    "FreeU": ("sdxl", patched("freelunch", "FreeU_V2", 1.3, 1.4, 0.9, 0.2)),
    "deep shrink": ("sdxl", patched("model_downscale", "PatchModelAddDownscale", 3, 2.0, 0.0, 1.0, True, "bicubic", "bicubic")),
    "scaled RoPE": ("flux", patched("rope", "ScaleROPE", 1.5, 0.0, 1.5, 0.0, 1.0, 0.0)),
    "scaled attention": ("sdxl", patched("attention_multiply", "UNetSelfAttentionMultiply", 1.2, 0.9, 1.1, 1.0)),
    "frequencies": ("flux", patched("fresca", "FreSca", 1.0, 1.5, 2)),
}
# Draws numbers in the middle of a block: before 2.15 no code can be made of that, and the blocks run eager.
RANDOM = {"HyperTile"}
# Another batch, another size; the others, whose patches are of the kinds in test_patches.py, are marked `rest`.
FIRST = {"Dual CFG", "two passes"}


@pytest.mark.parametrize("way", [way if way in FIRST else pytest.param(way, marks=pytest.mark.rest) for way in WAYS])
def test_equals_eager_and_adds_nothing_when_it_runs_again(tiny, engine, way):
    name, run = WAYS[way]
    # One kind of block is enough, but where a patch is for the other one.
    only = "single_blocks.*" if name == "flux" and way != "normalized attention" else ""
    runs = Runs(tiny, engine, name, cfg=3.0, size=128, only=only)
    expected, compiled = run(runs, runs.patcher), runs.attach(runs.patcher)
    if run.__name__ == "run_patched":
        assert not torch.allclose(expected, runs.run(runs.patcher), rtol=1e-3), "it does nothing here"
    same(run(runs, compiled), expected)
    graphs = runs.graphs
    same(run(runs, compiled), expected)
    assert runs.graphs == graphs
    if way in RANDOM and runs.failures:
        assert way in runs.failures[0] and "runs uncompiled" in runs.failures[0]
    else:
        assert graphs and not runs.failures


def test_high_and_low_noise(tiny, engine):
    """Wan 2.2: two models, one after the other in one schedule; they share code."""
    import nodes

    high, low = Runs(tiny, engine, "wan", cfg=3.0, size=64, length=5), Runs(tiny, engine, "wan", cfg=3.0, size=64, length=5)
    tiny._randomise(low.patcher.model.diffusion_model, seed=97)

    def sample(first, second):
        step = nodes.KSamplerAdvanced().sample
        given = (high.cfg, "euler", "simple", high.positive, high.negative)
        (half,) = step(first, "enable", 1, 4, *given, {"samples": high.latent}, 0, 2, "enable")
        (whole,) = step(second, "disable", 1, 4, *given, half, 2, 4, "disable")
        return whole["samples"]

    expected = sample(high.patcher, low.patcher)
    compiled = high.attach(high.patcher), low.attach(low.patcher)
    same(sample(*compiled), expected)
    graphs = high.graphs
    same(sample(*compiled), expected)
    assert not torch.allclose(expected, sample(high.patcher, high.patcher), rtol=1e-3)
    assert graphs and (high.graphs, low.graphs) == (graphs, graphs) and not high.failures


def wrapped(patcher, kind, wrapper):
    clone = patcher.clone()
    clone.add_wrapper_with_key(kind, "of another pack", wrapper)
    return clone


APPLY_MODEL = ("x", "t", "c_concat", "c_crossattn", "control", "transformer_options")
PREPARE_SAMPLING = ("model", "noise_shape", "conds", "model_options")


@pytest.mark.parametrize("named", range(len(APPLY_MODEL)), ids=APPLY_MODEL)
def test_a_wrapper_that_passes_arguments_by_name(tiny, engine, named):
    def by_name(names, named, executor, *args, **kwargs):
        return executor(*args[:named], **dict(zip(names[named:], args[named:], strict=False)), **kwargs)

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    patcher = wrapped(runs.patcher, "apply_model", functools.partial(by_name, APPLY_MODEL, named))
    patcher = wrapped(patcher, "prepare_sampling", functools.partial(by_name, PREPARE_SAMPLING, 0))
    same(runs.run(runs.attach(patcher)), runs.run(runs.patcher))
    assert runs.graphs
