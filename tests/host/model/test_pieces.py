"""Each piece of the engine that keeps patches right is needed: without it, the comparison that shows them right fails.

`host/model/test_unsound.py` does the same for every kind of patch, on models that others compile.
"""

import functools

import pytest
import torch
from patch_kinds import conditions, options, weights
from patching import Differs, Runs

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

WRONG = "with the patch:"


@pytest.fixture
def runs(tiny, engine):
    def made(name, blocks="single_blocks.*", **chosen):
        model = Runs(tiny, engine, name, **{"cfg": 1.0, **chosen})
        if name == "flux":  # one kind of block is enough
            model.attach = functools.partial(model.attach, only_blocks=blocks)
        return model

    return made


def first_and_others(cases):
    """Of `cases`, by name, the first one; the others are the same at more places."""
    first, *others = cases.items()
    return [pytest.param(*first[1], id=first[0]), *(pytest.param(*c, id=n, marks=pytest.mark.rest) for n, c in others)]


IN_BLOCKS = {
    "attention override": ("flux", options.overridden(options.passed_on)),
    "attn1_output_patch": ("flux", options.patched_with(options.scaled_output, "attn1_output_patch")),
    "attn2_patch in Wan": ("wan", options.patched_with(options.wan_output, "attn2_patch")),
    "attn1_patch in Qwen-Image": ("qwen_image", options.patched_with(options.flux_inputs, "attn1_patch")),
}


@pytest.mark.parametrize("name, patch", first_and_others(IN_BLOCKS))
def test_options_that_lose_what_is_in_them(runs, engine, monkeypatch, name, patch):
    empty = {"patches": {}, "patches_replace": {}}
    monkeypatch.setattr(engine("transformer_options.filter").OptionsFilter, "__call__", lambda self, given: (empty, []))
    with pytest.raises(Differs, match=WRONG):
        runs(name).check(patch)


def hide_guards(monkeypatch):
    compile_, hidden = torch.compile, {"guard_filter_fn": lambda entries: [False] * len(entries)}
    monkeypatch.setattr(torch, "compile", lambda function, **chosen: compile_(function, **{**chosen, "options": {**hidden}}))


READ = {
    "place": ("sdxl", options.overridden(options.by_place_of_attention), Differs),
    "step": ("sdxl", options.patched_with(options.by_sigma, "attn1_output_patch"), KeyError),
}


@pytest.mark.parametrize("name, patch, error", first_and_others(READ))
def test_patches_that_are_not_told_what_they_read(runs, engine, monkeypatch, name, patch, error):
    monkeypatch.setattr(engine("transformer_options.outside").HostOptions, "whole", lambda self, given: given)
    with pytest.raises(error, match=WRONG if error is Differs else None):
        runs(name).check(patch)


@pytest.mark.parametrize("share", [0.1, pytest.param(0.0, marks=pytest.mark.rest)])
def test_weights_in_low_memory_that_lose_their_lora(runs, engine, monkeypatch, share):
    monkeypatch.setattr(engine("host.weights.partial_load").StreamedTensors, "_apply", lambda self, tensor, item: tensor)
    flux = runs("flux")
    weights.load_partly(flux.patcher, share)
    with pytest.raises(Differs, match=WRONG):
        flux.check(weights.lora)


EXCHANGED = {
    "forward": (weights.forward_at("single_blocks.2.linear1"), Differs),
    "object": (weights.object_at("single_blocks.2.linear1"), KeyError),
    "class": (weights.class_at("single_blocks.2"), Differs),
    "LoRA in bypass mode": (weights.bypass_lora, Differs),
}
# In the second block of its transformer.
ATTENTION = "input_blocks.5.1.transformer_blocks.1.attn1"
READING = {
    "forward": (weights.place_reading_forward(ATTENTION),),
    "object": (weights.object_at(ATTENTION, weights.PlaceReader),),
}


@pytest.fixture
def looked_at_once(engine, monkeypatch):
    """What blocks consist of is noted when they run first, and never again."""
    monkeypatch.setattr(engine("blocks.state").BlockState, "holds", lambda *_: True)


@pytest.mark.parametrize("patch, error", first_and_others(EXCHANGED))
def test_exchanged_layers_without_guards(runs, monkeypatch, looked_at_once, patch, error):
    hide_guards(monkeypatch)
    with pytest.raises(error, match=WRONG if error is Differs else None):
        runs("flux").check(patch)


@pytest.mark.parametrize("patch", first_and_others(READING))
def test_exchanged_layers_that_are_not_told_their_place(runs, looked_at_once, patch):
    with pytest.raises(Differs, match=WRONG):
        runs("sdxl").check(patch)


def test_hooks_on_layers(runs, looked_at_once):
    with pytest.raises(Differs, match="with the hook:"):
        runs("flux").check_hook("single_blocks.2.linear1")


@pytest.mark.parametrize("path", ["single_blocks.2", pytest.param("double_blocks.1", marks=pytest.mark.rest)])
def test_a_forward_of_a_block_that_is_not_left_alone(runs, engine, monkeypatch, path):
    for name in ("foreign_forward", "given_forward"):
        monkeypatch.setattr(engine("compile.binding"), name, lambda _block: None)
    with pytest.raises(Differs, match=WRONG):
        runs("flux", blocks=path.replace(path[-1], "*")).check(weights.forward_at(path))


WRAPPED = {
    "LoRA": ("flux", weights.lora, {}),
    "LazyCache": ("flux", conditions.cached("LazyCacheNode"), {"steps": 6}),
    "context windows": ("wan", conditions.windowed, {"length": 33}),
}


@pytest.mark.parametrize("name, patch, chosen", first_and_others(WRAPPED))
def test_a_node_that_remembers_what_it_compiled_first(runs, monkeypatch, name, patch, chosen):
    """As nodes of other packs did: what is put upstream of them later is not in the clone that they hand out."""
    model = runs(name, **chosen)
    first = model.attach(model.patcher)
    monkeypatch.setattr(model, "attach", lambda patcher: first)
    with pytest.raises(Differs, match="with the patch upstream:"):
        model.check(patch)
