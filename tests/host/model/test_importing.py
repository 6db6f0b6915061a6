"""Until a model is compiled it runs uncompiled, a UNet replayed from CUDA graphs where it can be; then a call is traced."""

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
        asked: whether code was already made, each time the import was asked for.
    """

    def __init__(self, tiny, engine, monkeypatch, **settings):
        super().__init__(tiny, engine, "flux", cfg=1.0, steps=settings.pop("steps", 6))
        self.is_imported, self.asked, self.settings = False, [], settings
        self.may_lower = threading.Event()
        self.may_lower.set()
        calls = engine("host.model.network_calls")
        monkeypatch.setattr(calls, "imports_beside_calls", lambda _device: True)  # as on a GPU
        monkeypatch.setattr(calls, "is_imported", lambda: self.is_imported)
        for module in ("network_calls", "payback"):
            monkeypatch.setattr(
                engine(f"host.model.{module}"), "get_ready_to_compile", lambda **_: self.asked.append(self.code.compiles)
            )

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


@pytest.fixture
def unet(flux, engine, monkeypatch):
    """Taken for one."""
    monkeypatch.setattr(engine("host.graphs.policy"), "has_convolutions", lambda _network: True)
    return flux


@pytest.mark.parametrize("is_unet", [False, True])
def test_without_graphs_the_import_begins_at_once_and_what_comes_after_is_compiled(flux, request, is_unet):
    if is_unet:
        request.getfixturevalue("unet")
    plain = flux.run(flux.patcher)
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.asked[:1] == [0] and flux.code.compiles == 0 and flux.code.eager_calls
    flux.is_imported = True
    flux.image()
    flux.made()
    before = flux.code.eager_calls
    assert relative_error(flux.image(), plain) < 1e-5
    assert flux.code.compiles and flux.code.eager_calls == before


def test_where_the_compiler_is_imported_the_process_may_be_gone(flux):
    """It ends after a minute without work, for instance between the prompt that decides and the next."""
    flux.is_imported = True
    flux.image()
    flux.made()
    asked = len(flux.asked)
    assert asked and flux.code.compiles
    flux.image()
    assert len(flux.asked) == asked, "something is compiled: a graph starts the process if it has to"


def test_only_a_unets_operators_are_captured(flux, engine, monkeypatch):
    """Flux on an H200: to capture them and to compare took 1 s, and they are no faster."""
    record(engine, monkeypatch)
    flux.image()
    assert flux.captured.captures == 0 and flux.asked


@pytest.mark.parametrize("stand_in", [capture_again, record])
def test_with_graphs_operators_are_replayed_until_then(unet, engine, monkeypatch, stand_in):
    plain = unet.run(unet.patcher)
    stand_in(engine, monkeypatch)
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.captures == 1 and unet.captured.replays >= 3
    assert unet.asked and unet.code.compiles == 0
    unet.is_imported = True
    assert relative_error(unet.image(), plain) < 1e-5
    unet.made()
    assert unet.code.compiles, "a replay traces nothing: one call ran plainly"
    replays, eager = unet.captured.replays, unet.code.eager_calls
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.replays > replays and unet.code.eager_calls == eager
    assert unet.captured.differences == 0


def test_the_call_that_is_to_be_traced_may_end_before_a_block(unet, engine, monkeypatch):
    plain = unet.run(unet.patcher)
    capture_again(engine, monkeypatch)
    unet.image()
    unet.is_imported = True

    def stop(_module, _args):
        hook.remove()
        raise InterruptedError

    hook = unet.network.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        unet.image()
    assert relative_error(unet.image(), plain) < 1e-5
    unet.made()
    assert unet.code.compiles


@pytest.fixture
def by_default(unet, engine, monkeypatch):
    """Graphs as on a GPU, in the default mode: replays until there is code."""
    plain, wants = unet.run(unet.patcher), engine("settings").CompileSettings.wants_graphs
    record(engine, monkeypatch)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", wants)
    monkeypatch.setattr(engine("settings").CompileSettings, "may_have_graphs", True)  # as with inductor
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return unet, plain


def test_by_default_the_operators_are_replayed_until_code_is_there(by_default):
    unet, plain = by_default
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.captures == 1 and unet.captured.replays >= 3
    unet.may_lower.clear()
    unet.is_imported, replays = True, unet.captured.replays
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.code.is_being_compiled
    assert unet.captured.captures == 1 and unet.captured.replays == replays + unet.steps - 1
    unet.may_lower.set()
    unet.made()
    assert relative_error(unet.image(), plain) < 1e-5


def test_they_are_replayed_while_compiling_would_not_pay(by_default, engine, monkeypatch):
    """The first run's first calls are timed as they are without this pack; and the user can have compiling begin."""
    (unet, plain), payback = by_default, engine("host.model.payback")
    monkeypatch.setattr(payback, "counts_runs_on", lambda _device: True)
    monkeypatch.setattr(engine("host.model.structure_record"), "_records", {})
    monkeypatch.setattr(engine("host.model.structure_record"), "TRACE", 1e6)
    unet.is_imported, unet.steps = True, 12
    plain = unet.run(unet.patcher)
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.captures == 1 and unet.code.eager_calls == 7 and unet.captured.replays == 5
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.captures == 1 and unet.captured.replays == 17 and unet.code.compiles == 0
    assert not unet.asked
    payback.payback_of(unet.network).record.is_decided = True
    assert relative_error(unet.image(), plain) < 1e-5
    unet.made()
    assert unet.code.compiles
    assert relative_error(unet.image(), plain) < 1e-5
    assert unet.captured.differences == 0


def test_few_steps_are_captured_from_the_models_second_run_on(by_default, engine, monkeypatch):
    """ComfyUI may free the model after each prompt (`--cache-none`)."""
    (unet, plain), payback = by_default, engine("host.model.payback")
    monkeypatch.setattr(payback, "counts_runs_on", lambda _device: True)
    record = engine("host.model.structure_record").Record("a" * 12, seconds=1.0, runs=1, trace=1e6)
    monkeypatch.setattr(payback, "payback_of", engine("per_model").PerModel(lambda _network: payback.Payback(record)))
    monkeypatch.setattr(engine("host.model.wrapper"), "payback_of", payback.payback_of)
    monkeypatch.setattr(engine("host.model.network_calls"), "payback_of", payback.payback_of)
    for captures in (0, 1):
        assert relative_error(unet.image(), plain) < 1e-5
        assert unet.captured.captures == captures


def test_graphs_without_compiling_stay_and_nothing_is_put_off(unet, engine, monkeypatch):
    """After default settings, with which compiling was put off until it paid."""
    payback, plain = engine("host.model.payback"), unet.run(unet.patcher)
    monkeypatch.setattr(payback, "counts_runs_on", lambda _device: True)
    monkeypatch.setattr(engine("host.model.structure_record"), "_records", {})
    monkeypatch.setattr(engine("host.model.structure_record"), "TRACE", 1e6)
    record(engine, monkeypatch)
    for _ in range(2):
        assert relative_error(unet.image(), plain) < 1e-5
    assert payback.payback_of(unet.network).put_off() and unet.code.waits_for
    payback.payback_of(unet.network).record.is_decided = True
    monkeypatch.setattr(engine("settings").CompileSettings, "check_backend", lambda _settings: None)
    attached = super(Importing, unet).attach(unet.patcher, backend="cudagraphs", compile_when="in background")
    for _ in range(3):
        assert relative_error(unet.run(attached), plain) < 1e-5
        replays, unet.captured.replays = unet.captured.replays, 0
    assert replays >= unet.steps - 1 and unet.code.compiles == 0
    assert payback.payback_of(unet.network).put_off() is None and unet.code.waits_for is None


def test_where_the_user_waits_the_first_trace_imports_it(tiny, engine, monkeypatch):
    waiting = Importing(tiny, engine, monkeypatch, compile_when="before first image")
    plain = waiting.run(waiting.patcher)
    assert relative_error(waiting.image(), plain) < 1e-5
    assert waiting.code.compiles and waiting.code.eager_calls == 0 and 0 not in waiting.asked
