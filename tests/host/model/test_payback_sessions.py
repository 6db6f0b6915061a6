"""Whole sessions, as recorded: compiling when `payback.py` says so against compiling always, and never."""

import itertools
import types
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.host
# What compiling costs at most beside the better of *always* and *never*.
MARGIN = 1.05


@dataclass(frozen=True)
class Session:
    """Prompts of one model.

    Args:
        steps: of a prompt.
        step: seconds of an uncompiled one, of a UNet of one that is replayed.
        other: seconds of a prompt beside its steps: text, decoding, the file.
        start: seconds more of the first prompt after a start, in its first step.
        saved: share of a step.
        trace: seconds that compiling costs once code is kept; `cost`: before.
        sizes: by number of the prompt, how many times a step takes as long.
        starts: of ComfyUI, before these prompts.
        capture: seconds until a UNet's operators are replayed, in each prompt.
    """

    steps: int
    step: float
    other: float
    start: float
    saved: float
    trace: float
    cost: float
    prompts: int = 13
    sizes: tuple[tuple[int, float], ...] = ((7, 2.0),)
    starts: tuple[int, ...] = (0, 10)
    capture: float = 0.0


# H200 and H100 (benchmarks/results/sessions.json, docs/measurements.md); a machine with a slow processor (Z-Image, SDXL). The
# slow card is none that was measured.
FLUX = Session(steps=20, step=0.175, other=0.45, start=4.0, saved=0.24, trace=2.3, cost=4.0)
WAN = Session(steps=20, step=0.9, other=1.4, start=4.3, saved=0.18, trace=1.5, cost=4.0, prompts=4, sizes=(), starts=(0,))
SDXL = Session(steps=25, step=0.039, other=0.5, start=3.5, saved=0.14, trace=1.5, cost=3.0, capture=0.6)
SLOW_SDXL = replace(SDXL, cost=6.0, trace=3.4, capture=1.2)
SDXL_ON_A_SLOW_CARD = replace(SDXL, step=0.3, other=2.0, capture=1.0)
SD15 = Session(20, 0.02, 0.15, 2.0, 0.2, 1.0, 2.0, prompts=3, sizes=(), starts=(0,), capture=0.4)
Z_IMAGE = Session(steps=9, step=0.115, other=0.35, start=2.4, saved=0.11, trace=1.5, cost=2.8)
SLOW_Z_IMAGE = Session(steps=8, step=0.15, other=0.3, start=2.4, saved=0.2, trace=1.5, cost=4.0)
KLEIN = Session(steps=4, step=0.09, other=0.4, start=2.3, saved=0.1, trace=1.5, cost=3.0)
LIGHTNING = Session(steps=4, step=0.04, other=0.4, start=3.7, saved=0.14, trace=1.5, cost=3.0, capture=0.3)
RECORDED = {
    "Flux": FLUX,
    "Wan": WAN,
    "SDXL": SDXL,
    "SDXL, slow processor": SLOW_SDXL,
    "SDXL, slow card": SDXL_ON_A_SLOW_CARD,
    "SD 1.5": SD15,
    "Z-Image": Z_IMAGE,
    "Z-Image, slow processor": SLOW_Z_IMAGE,
    "klein": KLEIN,
    "SDXL with lightning": LIGHTNING,
}
# Prompts between two starts, and how many such sessions.
LENGTHS = {"one": (1, 10), "three": (3, 10), "sixty": (60, 2)}


@pytest.fixture
def history(engine, monkeypatch, tmp_path):
    """history(session, number, when): seconds of each of so many sessions with one folder, compiled `when`."""
    payback, records = engine("host.model.payback"), engine("host.model.structure_record")
    code_store = engine("cache.code_store")
    code_of, watch_of = engine("compile.registry").code_of, engine("messages.recompile_log").watch_of
    clock = [0.0]
    monkeypatch.setattr(payback, "counts_runs_on", lambda _device: True)
    for module in (payback, engine("devices")):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(records, "_records", {})
    monkeypatch.setattr(records, "call_later", lambda _seconds, write: write())
    monkeypatch.setattr(code_store._Current, "opened", True)
    folders = itertools.count()

    def prompt(session, number, network, is_first, is_kept, is_compiled, when):
        """Whether it was compiled at the end."""
        rule, code, sigmas = payback.payback_of(network), code_of(network), torch.linspace(1, 0, session.steps + 1)
        size = dict(session.sizes).get(number, 1.0)
        x = torch.zeros(1, 4, 8, int(8 * size))
        code.new_run()
        for step in range(session.steps):
            options = {"sigmas": sigmas[step : step + 1], "sample_sigmas": sigmas}
            worthwhile = rule.is_worthwhile(network, x, options, replays=session.capture > 0)
            compiles = worthwhile if when == "ours" else when == "always"
            seconds = session.step * size + (session.start if is_first and not step else 0.0)
            seconds += session.capture * (step == 2)
            if compiles and not is_compiled:
                code.traced += session.trace
                seconds += session.trace if is_kept else session.cost
                is_compiled = True
            elif compiles:
                seconds -= session.step * size * session.saved
                watch_of(network).saved = session.saved
            clock[0] += seconds
        rule.end_run(network)
        clock[0] += session.other
        return is_compiled

    def history(session, number, when="ours"):
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        store = code_store.CodeStore(folder, 2**30, code_store.read_key(folder))
        monkeypatch.setattr(code_store._Current, "store", store)
        seconds, is_kept, is_compiled, network = [], False, False, None
        for _ in range(number):
            began = clock[0]
            for prompt_number in range(session.prompts):
                if is_first := prompt_number in session.starts:
                    records._records.clear()
                    network = nn.Sequential(nn.Linear(1, 1))
                    is_kept, is_compiled = is_kept or is_compiled, False
                is_compiled = prompt(session, prompt_number, network, is_first, is_kept, is_compiled, when)
            seconds.append(clock[0] - began)
        return seconds

    return history


def check(history, name, length):
    session, number = RECORDED[name], 10
    spare = session.cost
    if length != "as recorded":
        prompts, number = LENGTHS[length]
        session = replace(session, prompts=prompts, starts=(0,))
    if length == "one":
        spare += session.trace  # that sessions are as short as that is not known from one of them
    ours, always, never = (itertools.accumulate(history(session, number, when)) for when in ("ours", "always", "never"))
    for taken, *others in zip(ours, always, never, strict=True):
        assert taken <= MARGIN * min(others) + spare


@pytest.mark.parametrize("length", ["as recorded", *LENGTHS])
@pytest.mark.parametrize("name", RECORDED)
def test_it_takes_at_most_as_long_as_the_better_of_always_and_never_and_one_trace(history, name, length):
    """After each of some sessions."""
    check(history, name, length)


def test_a_rule_that_always_compiles_is_seen(history, engine, monkeypatch):
    monkeypatch.setattr(engine("host.model.payback"), "RUNS", 1000)
    with pytest.raises(AssertionError):
        check(history, "klein", "one")


def test_a_rule_that_never_compiles_is_seen(history, engine, monkeypatch):
    monkeypatch.setattr(engine("host.model.structure_record"), "TRACE", 1e6)
    with pytest.raises(AssertionError):
        check(history, "Flux", "sixty")


def test_a_rule_that_forgets_how_short_sessions_are_is_seen(history, engine, monkeypatch):
    monkeypatch.setattr(engine("host.model.structure_record").Record, "keep", lambda _record: None)
    with pytest.raises(AssertionError):
        check(history, "Flux", "one")


@pytest.mark.parametrize(("name", "share"), {"Flux": 0.92, "Wan": 0.95}.items())
def test_a_first_session_takes_at_most_so_much_of_an_uncompiled_one(history, name, share):
    assert history(RECORDED[name], 1)[0] <= share * history(RECORDED[name], 1, "never")[0]


@pytest.mark.parametrize("name", ["Flux", "Wan"])
def test_large_models_are_compiled_in_their_first_prompt(history, name):
    """Also after a restart, from their first step on."""
    ours, always = (history(RECORDED[name], 2, when) for when in ("ours", "always"))
    step = RECORDED[name].step * RECORDED[name].saved
    assert ours[0] <= always[0] + 4 * step + 1e-6 and ours[1] == pytest.approx(always[1])


UNETS = ["SDXL", "SDXL, slow processor", "SD 1.5", "SDXL with lightning"]


@pytest.mark.parametrize("name", ["Z-Image", "Z-Image, slow processor", "klein", *UNETS])
def test_what_saves_little_costs_nothing_in_a_first_session(history, name):
    assert history(RECORDED[name], 1) == pytest.approx(history(RECORDED[name], 1, "never"))


def test_a_unet_that_keeps_the_gpu_busy_is_compiled_after_some_prompts(history):
    ours, never = (history(SDXL_ON_A_SLOW_CARD, 1, when)[0] for when in ("ours", "never"))
    assert ours < never


@pytest.mark.parametrize("name", ["Z-Image, slow processor"])
def test_few_steps_are_compiled_in_their_first_prompt_once_code_is_kept(history, name):
    """Where a trace pays in a session of that length."""
    ours, always = (history(RECORDED[name], 10, when)[-1] for when in ("ours", "always"))
    assert ours == pytest.approx(always) and ours < history(RECORDED[name], 1, "never")[0]
