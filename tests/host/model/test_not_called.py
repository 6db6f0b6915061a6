"""Another pack runs a model's parts itself (DeepCache): nothing can be compiled, and the node's line and the report say so."""

import pytest
from patching import Runs, patched, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
SAID = ["leftAsIs", ["notCalled"]]


@pytest.fixture
def flux(tiny, engine):
    return Runs(tiny, engine, "flux", cfg=1.0)


@pytest.fixture
def told(engine, monkeypatch):
    """What the node's line said, in order."""
    said = []
    monkeypatch.setattr(engine("messages.status"), "listeners", [lambda _owner, node, line: said.append(line.says)])
    return said


def attached(flux):
    settings = flux.engine("settings").CompileSettings(backend="eager", compile_when="before first image")
    return flux.engine("host.model.attach").attach(flux.patcher, settings, "7")


def in_parts(stop=None):
    def patch(m):
        def run(_apply_model, given):
            if stop is not None:
                raise stop
            return given["input"] * 0.5

        m.set_model_unet_function_wrapper(run)

    return patch


def notes(flux, patcher):
    return [note for note in flux.engine("host.model.attach").notes_about(patcher) if "DeepCache" in note]


def test_the_line_says_it_until_the_model_is_called_again(flux, told):
    compiled = attached(flux)
    elsewhere = patched(compiled, in_parts())
    same(flux.run(elsewhere), flux.run(patched(flux.patcher, in_parts())))
    assert told[-1] == SAID and len(notes(flux, elsewhere)) == 1 and flux.graphs == 0
    flux.run(compiled)
    assert told[-1] != SAID and notes(flux, compiled) == [] and flux.graphs
    flux.run(elsewhere)
    assert told[-1] == SAID


def test_a_run_that_was_cancelled_or_has_no_steps_says_nothing(flux, told):
    import comfy.model_management

    stop = comfy.model_management.InterruptProcessingException
    compiled = attached(flux)
    with pytest.raises(stop):
        flux.run(patched(compiled, in_parts(stop())))
    cached = patched(compiled, lambda m: m.model_options.__setitem__("sampler_calc_cond_batch_function", no_call))
    flux.run(cached)
    assert SAID not in told and notes(flux, cached) == []


def no_call(given):
    """A step that is taken from a cache."""
    return [given["input"] * 0.5 for _ in given["conds"]]
