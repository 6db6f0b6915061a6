"""Code whose graphs break takes turns with uncompiled calls, and the faster kind stays."""

import contextlib

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from patch_kinds import conditions, options
from patching import Runs, patched

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    """Runs on what counts as a GPU. `took` has the seconds of calls by kind; `kinds(patcher)` runs it, and tells the kinds."""
    comparison, wrapper = engine("host.model.comparison"), engine("host.model.wrapper")
    runs, now, kinds = Runs(tiny, engine, "flux", cfg=1.0, steps=20, only="single_blocks.*"), [0.0], []
    runs.took = {"compiled": 0.2, "uncompiled": 0.2}

    def timed(kind, call):
        def made(*args):
            kinds.append(kind)
            now[0] += runs.took[kind]
            return call(*args)

        return made

    monkeypatch.setattr(comparison, "_comparisons", {})
    monkeypatch.setattr(comparison, "takes_turns_on", lambda _device: True)
    monkeypatch.setattr(comparison, "seconds_when_done", lambda _device: now[0])
    monkeypatch.setattr(wrapper, "eager", timed("uncompiled", wrapper.eager))
    monkeypatch.setattr(wrapper.NetworkCalls, "run", timed("compiled", wrapper.NetworkCalls.run))

    def run(patcher):
        del kinds[:]
        runs.image = runs.run(patcher)
        return list(kinds)

    runs.kinds = run
    return runs


def with_patch(patcher):
    return patched(patcher, options.patched_with(options.flux_inputs, "attn1_patch"))


@pytest.mark.parametrize("seconds", [0.3, 0.205, 0.1], ids=["slower", "as fast", "faster"])
def test_the_faster_kind_of_call_stays(flux, engine, seconds):
    expected = flux.run(with_patch(flux.patcher))
    flux.took = {"compiled": seconds, "uncompiled": 0.2}
    compiled = with_patch(flux.attach(flux.patcher))
    kinds = flux.kinds(compiled)
    turns = kinds[1:14]  # the first call traces
    assert 6 <= turns.count("uncompiled") <= 7 and turns[:6] != turns[:2] * 3, "nor do they have a rhythm"
    stays = "uncompiled" if seconds == 0.3 else "compiled"
    assert set(kinds[14:]) == set(flux.kinds(compiled)) == {stays} and torch.equal(flux.image, expected)
    slower = engine("messages.recompile_log").watch_of(flux.patcher.model.diffusion_model).left_slower
    assert slower == (["slowerCompiled", "1.50", "0.200", "0.300"] if seconds == 0.3 else None)
    notes = " ".join(engine("host.model.attach").notes_about(compiled))
    assert ("1.50 times as long" in notes) is (seconds == 0.3)
    assert set(flux.kinds(flux.attach(flux.patcher))) == {"compiled"}, "its graphs do not break without the patch"


def test_each_size_is_compared_and_other_prompts_run_what_is_known_to_be_faster(flux, tiny):
    """A small image may be slower compiled where a large one is faster."""
    flux.took["compiled"], compiled = 0.3, with_patch(flux.attach(flux.patcher))
    assert flux.kinds(compiled)[-1] == "uncompiled"
    flux.positive, plain = conditions.other_prompt(flux, tokens=40), flux.positive
    assert set(flux.kinds(compiled)) == {"uncompiled"}
    flux.positive, flux.latent, flux.took["compiled"] = plain, tiny.empty_latent("flux", 96, 64), 0.1
    kinds = flux.kinds(compiled)
    assert "uncompiled" in kinds[:13] and set(kinds[13:]) == {"compiled"}


def test_other_prompts_take_no_turns_of_a_comparison(flux):
    """They compute more, or less."""
    compiled, flux.steps = with_patch(flux.attach(flux.patcher)), 4
    assert "uncompiled" in flux.kinds(compiled)
    flux.positive = conditions.other_prompt(flux, tokens=40)
    assert set(flux.kinds(compiled)) == {"compiled"}


def test_a_model_that_is_loaded_again_is_not_compared_again(flux, tiny):
    """ComfyUI may free a model after each prompt."""
    flux.took["compiled"] = 0.3
    flux.kinds(with_patch(flux.attach(flux.patcher)))
    flux.patcher = tiny.build_patcher("flux")
    assert flux.kinds(with_patch(flux.attach(flux.patcher)))[2:] == ["uncompiled"] * 18


def test_where_a_wrapper_may_skip_the_blocks_nothing_is_compared(flux):
    """A skipped call takes no time, whichever its kind."""
    flux.took["compiled"], compiled = 0.3, with_patch(flux.attach(flux.patcher))
    wrapped = compiled.clone()
    wrapped.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "a step cache", lambda executor, *args, **kwargs: executor(*args, **kwargs)
    )
    assert set(flux.kinds(wrapped)) == {"compiled"}
    assert "uncompiled" in flux.kinds(compiled)


@pytest.mark.parametrize("why", ["new code", "a warmup", "code is made"])
def test_when_calls_take_turns(flux, engine, monkeypatch, why):
    flux.took["compiled"], compiled = 0.3, with_patch(flux.attach(flux.patcher))
    network = flux.patcher.model.diffusion_model
    if why == "new code":
        flux.kinds(compiled)
        next(iter(engine("compile.registry").code_of(network).groups.values())).code.compiles += 1
        kinds = flux.kinds(compiled)
        assert "compiled" in kinds[:14] and set(kinds[14:]) == {"uncompiled"}
        return
    if why == "code is made":
        monkeypatch.setattr(engine("compile.registry").ModelCode, "is_being_compiled", True)
    with engine("messages.recompile_log").warming() if why == "a warmup" else contextlib.nullcontext():
        assert set(flux.kinds(compiled)) == {"compiled"}
