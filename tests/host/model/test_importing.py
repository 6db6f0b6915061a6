"""Until the compiler is imported a model runs uncompiled, replayed from CUDA graphs where it can be; then it is compiled."""

import functools
import threading

import pytest
import torch
from capturing import capture_again, record
from patching import Runs
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Importing(Runs):
    """Runs during which the compiler is not imported until the test says so.

    Attributes:
        asked: before which call of the model the import was asked for.
    """

    def __init__(self, tiny, engine, monkeypatch, **settings):
        super().__init__(tiny, engine, "flux", cfg=1.0, steps=settings.pop("steps", 6))
        self.is_imported, self.asked, self.settings = False, [], settings
        self.may_lower = threading.Event()
        self.may_lower.set()
        calls = engine("host.model.network_calls")
        monkeypatch.setattr(calls, "may_wait", lambda _device: True)  # as on a GPU
        monkeypatch.setattr(calls, "is_imported", lambda: self.is_imported)
        monkeypatch.setattr(calls, "import_ahead", lambda: self.asked.append(self.code.waited))

    @property
    def network(self):
        return self.patcher.model.diffusion_model

    @property
    def code(self):
        return self.engine("compile.registry").code_of(self.network)

    @property
    def captured(self):
        return self.engine("cuda_graphs.capture").graphs_of(self.network)

    def attach(self, patcher):
        settings = {"compile_when": "in background", "only_blocks": "single_blocks.*", "backend": "eager", **self.settings}
        attached = super().attach(patcher, **settings)
        lowerers = self.engine("compile.traced_graph").LOWERERS
        lowerers["eager"] = functools.partial(self._lower, lowerers["eager"])
        return attached

    def _lower(self, lower, *request):
        assert self.may_lower.wait(60)
        return lower(*request)

    def image(self, patcher=None):
        return self.run(self.attach(patcher or self.patcher))

    def made(self):
        assert self.engine("background.thread").compiler.wait(120)


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    return Importing(tiny, engine, monkeypatch)


def test_without_graphs_the_import_begins_at_once_and_what_comes_after_is_compiled(flux):
    plain = flux.run(flux.patcher)
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.asked[:1] == [1] and flux.code.compiles == 0 and flux.code.eager_calls
    flux.is_imported = True
    flux.image()
    flux.made()
    before = flux.code.eager_calls
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.code.compiles and flux.code.eager_calls == before


@pytest.mark.parametrize("stand_in", [capture_again, record])
def test_with_graphs_operators_are_replayed_until_then(flux, engine, monkeypatch, stand_in):
    plain = flux.run(flux.patcher)
    stand_in(engine, monkeypatch)
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.captured.captures == 1 and flux.captured.replays >= 3
    assert flux.asked[0] == 4, "not before a call was replayed"
    assert flux.code.compiles == 0
    flux.is_imported = True
    assert relative_error(flux.image(), plain) < 1e-5
    flux.made()
    assert flux.code.compiles, "a replay traces nothing: one call ran plainly"
    replays, eager = flux.captured.replays, flux.code.eager_calls
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.captured.replays > replays and flux.code.eager_calls == eager
    assert flux.captured.differences == 0


def test_calls_of_many_seconds_are_not_waited_for(flux, engine, monkeypatch):
    """Of a video: the third is a minute later."""
    record(engine, monkeypatch)
    monkeypatch.setattr(engine("host.model.network_calls"), "SECONDS_TO_REPLAY", -1.0)
    flux.image()
    assert flux.asked[0] == 1


def test_a_model_of_few_steps_has_the_compiler_imported_between_its_prompts(tiny, engine, monkeypatch):
    """A checkpoint for two steps that is freed after each prompt never comes to a replay."""
    short = Importing(tiny, engine, monkeypatch, steps=2)
    record(engine, monkeypatch)
    short.image()
    assert short.asked == [2] and short.captured.replays == 0


def test_the_call_that_is_to_be_traced_may_end_before_a_block(flux, engine, monkeypatch):
    plain = flux.run(flux.patcher)
    capture_again(engine, monkeypatch)
    flux.image()
    flux.is_imported = True

    def stop(_module, _args):
        hook.remove()
        raise InterruptedError

    hook = flux.network.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        flux.image()
    assert relative_error(flux.image(), plain) < 1e-5
    flux.made()
    assert flux.code.compiles


def test_by_default_the_operators_are_replayed_until_code_is_there(flux, engine, monkeypatch):
    plain, wants = flux.run(flux.patcher), engine("settings").CompileSettings.wants_graphs
    record(engine, monkeypatch)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", wants)
    monkeypatch.setattr(engine("settings").CompileSettings, "may_have_graphs", True)  # as with inductor
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.captured.captures == 1 and flux.captured.replays >= 3
    flux.may_lower.clear()
    flux.is_imported, replays = True, flux.captured.replays
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.code.is_being_compiled
    assert flux.captured.captures == 1 and flux.captured.replays == replays + flux.steps - 1
    flux.may_lower.set()
    flux.made()
    assert relative_error(flux.image(), plain) < 1e-5


def test_where_the_user_waits_the_first_trace_imports_it(tiny, engine, monkeypatch):
    waiting = Importing(tiny, engine, monkeypatch, compile_when="before first image")
    plain = waiting.run(waiting.patcher)
    assert relative_error(waiting.image(), plain) < 1e-5
    assert waiting.code.compiles and not waiting.asked and waiting.code.eager_calls == 0
