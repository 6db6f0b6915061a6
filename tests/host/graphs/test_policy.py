"""Whether CUDA graphs pay: measured in calls of compiled code, for each size."""

import functools
import types
from collections import Counter

import pytest
import torch
from capturing import capture_again, trust
from patching import Runs
from support import NoCompiler, compile_settings
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


# The first call of the code, those that are measured, and what a capture needs.
CALLS = 6


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x, transformer_options={}):  # noqa: B006
        for block in self.blocks:
            x = block(x)
        return x


class Machine:
    """Calls take 0.1 s to launch; the GPU works on for `backlog` of that. The next call begins after `between` of it."""

    def __init__(self, engine, monkeypatch, cache=None):
        self.engine, self.now, self.backlog, self.between, self.launched = engine, 0.0, 0.1, 0.0, False
        NoCompiler(engine, monkeypatch.setattr)
        trust(engine, monkeypatch, "test_policy.py")
        policy = engine("host.graphs.policy")
        monkeypatch.setattr(policy, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(policy, "current", lambda: cache)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        self.moments = []
        moment = lambda _device: self.moments.pop(0) if self.moments else 0.0  # noqa: E731
        monkeypatch.setattr(engine("cuda_graphs.capture"), "seconds_when_done", moment)

    def wait(self, *_):
        self.now += 0.1 * self.backlog * self.launched
        self.launched = False

    def model(self, **settings):
        """A function that calls a new model with `size` numbers and returns how many captures there have been."""
        engine, network = self.engine, TwoBlocks().requires_grad_(False)
        host_calls = engine("host.model.network_calls")
        calls = host_calls.NetworkCalls(engine("settings").CompileSettings(**settings))
        loaded = engine("host.weights.blocks").Loaded(network, network, torch.float32, torch.device("cpu"))
        host_calls.begin_run(network)

        skips = []

        def run(x):
            self.now, self.launched = self.now + 0.1, True
            return torch.zeros_like(x) if skips and skips.pop() else network(x, transformer_options={})

        def call(size=8):
            x = torch.ones(size // 4, 4)
            self.now += 0.1 * self.between
            with calls.prepared() as made:
                calls.run(loaded, made, x.numel(), functools.partial(run, x))
            assert engine("background.thread").compiler.wait(60)
            return engine("cuda_graphs.capture").graphs_of(network).captures

        call.skips, call.network = skips, network
        call.code = engine("compile.registry").code_of(network)
        return call


@pytest.fixture
def machine(engine, monkeypatch):
    wants = engine("settings").CompileSettings.wants_graphs
    capture_again(engine, monkeypatch)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", wants)
    # Code that another test has compiled is not asked for: the first call would be a compiled one.
    monkeypatch.setattr(engine("cache.code_store")._Current, "opened", True)
    monkeypatch.setattr(engine("cache.code_store")._Current, "store", None)
    return Machine(engine, monkeypatch)


@pytest.mark.parametrize("when", ["in background", "before first image"])
@pytest.mark.parametrize("pays", [True, False])
def test_compiled_calls_decide(machine, when, pays):
    call = machine.model(compile_when=when)
    machine.backlog = 9.0 if pays else 0.0  # of calls that are not compiled yet
    call()
    assert call.code.compiles, "the first call is traced"
    if when == "in background":
        call()  # the first of the compiled code
    machine.backlog = 0.0 if pays else 9.0
    assert [call() for _ in range(CALLS)][-1] == pays


@pytest.mark.parametrize(("between", "pays"), [(0.1, False), (0.24, True), (1.0, True)])
def test_what_the_host_does_between_two_calls_counts(machine, between, pays):
    """The GPU that is done before the next call begins waits, though it works on after the launches."""
    call = machine.model(compile_when="before first image")
    machine.backlog, machine.between = 0.5, between
    assert [call() for _ in range(CALLS)][-1] == pays


def test_what_is_a_preview_perhaps_counts_little(machine):
    """There the host waits for the GPU, which would have no work either if calls were replayed."""
    call = machine.model(compile_when="before first image")
    machine.backlog, machine.between = 0.6, 1.0
    assert [call() for _ in range(CALLS)][-1] == 0


@pytest.mark.parametrize("why", ["failed", "uncalled"])
def test_blocks_that_run_as_without_this_pack_decide_nothing_and_wait_for_nothing(machine, engine, monkeypatch, why):
    call, waits = machine.model(compile_when="before first image"), []
    call()
    if why == "failed":
        monkeypatch.setattr(engine("compile.group").BlockGroup, "failure", "out of memory")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
    for _ in range(CALLS):
        if why == "uncalled":
            call.code.uncalled = Counter(TwoBlocks=2)
        assert call() == 0
    assert not waits


class Gpu:
    """Clocks of the CPU and of a GPU that works on its own; seconds."""

    def __init__(self):
        self.now = self.ends = 0.0

    def launch(self, seconds, work):
        begins = max(self.ends, self.now)
        self.now += seconds
        self.ends = max(begins + work, self.now)

    def wait(self, *_):
        self.now = max(self.now, self.ends)


@pytest.mark.parametrize("beside", ["nothing", "a ControlNet", "another model", "a larger size", "a prompt before each call"])
def test_a_gpu_that_has_enough_to_do_needs_no_graphs(engine, monkeypatch, beside):
    """It works 0.21 s for a call that takes 0.1 s to launch; beside a ControlNet 0.16 s."""
    policy, gpu, networks = engine("host.graphs.policy"), Gpu(), [nn.Linear(1, 1), nn.Linear(1, 1)]
    monkeypatch.setattr(policy, "time", types.SimpleNamespace(perf_counter=lambda: gpu.now))
    monkeypatch.setattr(policy, "current", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    code = types.SimpleNamespace(compiles=1, runs=1, is_being_compiled=False, uncalled=None, groups={})
    monkeypatch.setattr(policy, "code_of", lambda _network: code)
    monkeypatch.setattr(policy, "has_convolutions", lambda _network: False)
    monkeypatch.setattr(policy, "no_graphs", lambda _device: None)
    settings, device = engine("settings").CompileSettings(), torch.device("cpu")

    def call(network, size, launching=0.1, work=0.21):
        made = types.SimpleNamespace(ran=True, uncompiled=False)
        run = functools.partial(gpu.launch, launching, work)
        way = policy.way_of_call(settings, network, device, size, policy.Notes())
        policy.measure(network, device, size, made, run) if way is policy.Way.MEASURED else run()
        gpu.now += 0.005
        return way

    if beside == "a larger size":
        policy.payoff_of(networks[0]).not_from = 64
    for _ in range(CALLS):
        if beside == "a ControlNet":
            gpu.launch(0.04, 0.08)
        elif beside == "another model":
            call(networks[1], 8)
        elif beside == "a larger size":
            call(networks[0], 64, 0.12, 0.6)
        elif beside == "a prompt before each call":
            gpu.now, code.runs = gpu.now + 20, code.runs + 1
        way = call(networks[0], 8, work=0.16 if beside == "a ControlNet" else 0.21)
    assert way is policy.Way.COMPILED


@pytest.mark.parametrize("pays", [True, False])
def test_one_call_beside_other_work_does_not_decide(machine, pays):
    call, usual = machine.model(compile_when="before first image"), 0.0 if pays else 9.0
    call()
    for backlog in (9.0 - usual, usual, usual):
        machine.backlog = backlog
        call()
    assert [call() for _ in range(2)][-1] == pays


def test_a_warmup_compiles_though_nothing_was_measured_before(engine, tiny, machine):
    """It makes two calls, which were both measured uncompiled on a GPU."""
    runs, policy = Runs(tiny, engine, "flux", cfg=1.0, steps=2), engine("host.graphs.policy")
    patcher = engine("host.model.attach").attach(runs.patcher, compile_settings(engine, mode="auto", backend="inductor"))
    size = engine("host.nodes.warmup_plan").Size(64, 64)
    prompts = runs.positive, runs.negative
    engine("host.nodes.warmup").warm_up(patcher, *prompts, 1.0, [size], None, None)
    assert runs.graphs == 2
    assert policy.payoff_of(runs.patcher.model.diffusion_model).pay_to, "nothing is measured in the first prompt"


def test_graphs_that_do_not_pay_for_a_large_image_may_pay_for_a_small_one(machine):
    call, large = machine.model(compile_when="before first image"), 4 * 64
    machine.backlog = 9.0
    assert [call(large) for _ in range(CALLS)][-1] == 0
    machine.backlog = 0.0
    assert [call() for _ in range(CALLS)][-1] == 1
    machine.backlog = 9.0
    for size in (large, 2 * large, 8):  # a second pass of high resolution
        assert [call(size) for _ in range(CALLS)][-1] == 1


def test_graphs_that_pay_for_a_small_image_are_measured_for_a_large_one(machine):
    call = machine.model(compile_when="before first image")
    machine.backlog = 0.0
    assert [call() for _ in range(CALLS)][-1] == 1
    machine.backlog = 9.0
    assert [call(4 * 64) for _ in range(CALLS)][-1] == 1


@pytest.mark.parametrize(("saved", "pays"), [(0.02, True), (0.01, False), (-0.01, False)])
def test_a_capture_that_is_not_saved_back_soon_is_the_last(machine, engine, saved, pays):
    """For Flux on a slow processor each capture took 0.7 s, and a replay saved 0.003 s."""
    call = machine.model()
    graphs, policy = engine("cuda_graphs.capture").graphs_of(call.network), engine("host.graphs.policy")
    capture, plain, replayed = (0.0, 0.5), (1.0, 1.1), 2.0
    while not graphs.captures:
        machine.moments = [*capture, *plain, replayed, replayed + 0.1 - saved]
        assert call() <= 1
    assert not machine.moments and graphs.checks == 1
    call()
    assert bool(graphs.graphs) is pays and (graphs.replays > 0) is pays and graphs.captures == 1
    payoff = policy.payoff_of(call.network)
    assert [payoff.pays(size) for size in (8, 6)] == [pays or False, True if pays else None]
    settings = engine("settings").CompileSettings()
    assert [policy.judge_for(settings, call.network, size) is None for size in (9, 8, 6)] == [False, pays, pays]


def test_a_node_that_asks_for_graphs_has_them_whatever_they_save(machine, engine):
    call = machine.model(mode="reduce-overhead")
    graphs = engine("cuda_graphs.capture").graphs_of(call.network)
    while not graphs.captures:
        machine.moments = [0.0, 5.0, 6.0, 6.1, 7.0, 7.1]
        call()
    assert graphs.graphs and machine.moments[:1] == [6.0], "nothing is timed to find out"


def test_unets_are_always_replayed(machine, engine, monkeypatch):
    """In graphs their convolutions are faster."""
    monkeypatch.setattr(engine("host.graphs.policy"), "has_convolutions", lambda _network: True)
    call, machine.backlog = machine.model(compile_when="before first image"), 9.0
    assert [call() for _ in range(CALLS)][-1] == 1
    assert [call(4 * 64) for _ in range(CALLS)][-1] == 2


def test_a_call_that_a_step_cache_skips_tells_nothing(machine):
    """EasyCache skips calls of the model inside the host's `apply_model`."""
    call = machine.model(compile_when="before first image")
    call()
    call.skips[:] = [True] * 3
    for _ in range(3):
        call()
    machine.backlog = 9.0
    assert [call() for _ in range(CALLS)][-1] == 0


def test_what_was_measured_outlives_a_restart(engine, monkeypatch):
    capture_again(engine, monkeypatch)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", False)
    kept = {}
    cache = types.SimpleNamespace(remember=lambda _network, choices: kept.update(choices), choices=lambda _network: kept)
    machine = Machine(engine, monkeypatch, cache)
    first = machine.model(compile_when="before first image")
    machine.backlog = 9.0
    for _ in range(CALLS):
        first(64)
    machine.backlog = 0.0
    assert [first(8) for _ in range(CALLS)][-1] == 1
    again, machine.backlog = machine.model(compile_when="before first image"), 9.0
    assert [again(64) for _ in range(2)][-1] == 0 and [again(128) for _ in range(2)][-1] == 0
    assert [again(8) for _ in range(2)][-1] == 1, "known to pay: plain, captured"


# Seconds that captures take in processes that follow each other (a replay saves 0.02), and how many processes capture.
CAPTURES = {"far from paying": ([3.0] * 2, 1), "refused in two": ([1.5] * 3, 2), "paid between": ([1.5, 0.3, 1.5, 1.5, 1.5], 4)}


@pytest.mark.parametrize("name", CAPTURES)
def test_a_capture_that_does_not_pay_is_the_last_in_later_processes_if_that_is_certain(engine, monkeypatch, name):
    """A busy machine makes it take some times as long."""
    costs, captured = CAPTURES[name]
    capture_again(engine, monkeypatch)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", False)
    kept = {}
    cache = types.SimpleNamespace(remember=lambda _network, choices: kept.update(choices), choices=lambda _network: kept)
    machine = Machine(engine, monkeypatch, cache)
    for process, cost in enumerate(costs):
        monkeypatch.setattr(engine("host.graphs.policy"), "_refused_here", set())
        for model in range(2 if process == 0 and name != "far from paying" else 1):
            call = machine.model(compile_when="before first image")
            machine.moments = [0.0, cost, 6.0, 6.1, 7.0, 7.08]
            assert [call() for _ in range(CALLS + 1)][-1] == (process < captured), f"model {model} of process {process}"
            assert bool(engine("cuda_graphs.capture").graphs_of(call.network).graphs) is (cost < 1)


@pytest.mark.parametrize("kept", ["", "pay to much, not from 7", "pay to 3, not from 7, refused from all", "pay to 3"])
def test_what_another_machine_has_kept_may_be_anything(engine, monkeypatch, kept):
    """Files of Save Compile Cache bring such texts along."""
    policy = engine("host.graphs.policy")
    monkeypatch.setattr(policy, "current", lambda: types.SimpleNamespace(choices=lambda _name: {"graphs pay": kept}))
    assert repr(policy._payoff_for(nn.Linear(2, 2))) == repr(policy.Payoff())
