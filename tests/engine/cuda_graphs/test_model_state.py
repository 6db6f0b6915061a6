"""What CUDA graphs know of a model."""

import gc
import types
import weakref

import pytest
import torch
from capturing import trust
from support import Net
from torch import nn


class Cache:
    def __init__(self):
        self.keys = torch.zeros(3)


@pytest.fixture
def looked_at(engine, monkeypatch):
    """A network of the host's, and a function: whether graphs go when the network is looked at, in a new run or in the same."""
    trust(engine, monkeypatch, "support.py", "test_model_state.py")
    state, net, dropped = engine("cuda_graphs.model_state").ModelState(), Net().eval(), []
    net.pair, net.entry.parts = nn.ModuleDict({"q": nn.Linear(2, 2), "k": nn.Linear(2, 2)}), [None, types.SimpleNamespace()]
    net.entry.kept = Cache()
    net.entry.scales, net.entry.params, net.entry.mask = {"a": 1.0}, types.SimpleNamespace(theta=1.0), torch.zeros(3)

    def drops(is_new_run=True):
        if is_new_run:
            state.new_run()
        state.check_unchanged(net, torch.device("cpu"), None, lambda: dropped.append(1))
        found = bool(dropped)
        dropped.clear()
        return found

    assert drops() and not drops() and not drops(False)
    return net, drops, state


def test_a_model_is_freed(engine):
    graphs_of = engine("cuda_graphs.capture").graphs_of
    net = Net()
    graphs_of(net).drop_if_stale(net, torch.device("cpu"))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def exchange_names(modules):
    first, second = [modules._modules.pop(name) for name in ("q", "k")]
    modules._modules.update(k=first, q=second)


BETWEEN_RUNS = {
    "a number": lambda net: setattr(net.entry, "strength", 0.2),
    "a private one": lambda net: setattr(net.entry, "_strength", 0.2),
    "a number of an object": lambda net: setattr(net.entry.params, "theta", 2.0),
    "another object": lambda net: setattr(net.entry, "params", types.SimpleNamespace(theta=1.0)),
    "a dict, in place": lambda net: net.entry.scales.update(a=2.0),
    "values in another order": lambda net: net.entry.parts.reverse(),
    "layers under each other's names": lambda net: exchange_names(net.pair),
    "a weight elsewhere": lambda net: setattr(net.entry, "weight", nn.Parameter(net.entry.weight.clone())),
    "another layer": lambda net: setattr(net, "entry", nn.Linear(8, 8)),
    "a number of a class": lambda net: setattr(type(net), "factor", getattr(type(net), "factor", 0) + 1),
}
BETWEEN_CALLS = {
    "another tensor": lambda net: setattr(net.entry, "mask", torch.zeros(3)),
    "a tensor in a cache": lambda net: net.entry.cache.update(k=torch.zeros(1)),
    "an object that holds tensors": lambda net: setattr(net.entry, "kept", Cache()),
    "an attribute more": lambda net: setattr(net.entry, "added", True),
    "another weight": lambda net: setattr(net.entry, "weight", nn.Parameter(net.entry.weight.clone())),
    "a layer in one that had none": lambda net: net.entry.add_module("lora", nn.Linear(8, 8)),
    "a buffer in a layer that had none": lambda net: net.entry.register_buffer("offset", torch.zeros(8)),
    "a layer more": lambda net: net.blocks.append(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("change", [*BETWEEN_RUNS.values(), *BETWEEN_CALLS.values()], ids=[*BETWEEN_RUNS, *BETWEEN_CALLS])
def test_graphs_go_when_the_model_has_changed_between_two_runs(looked_at, change, monkeypatch):
    net, drops, _ = looked_at
    net.entry.cache = {}
    drops()
    kept = net.entry, net.entry.weight, net.entry.mask, net.entry.params  # else another may get the same address
    monkeypatch.setattr(type(net), "factor", 0, raising=False)
    drops()
    change(net)
    assert kept and drops() and not drops()


@pytest.mark.parametrize("change", BETWEEN_CALLS.values(), ids=BETWEEN_CALLS)
def test_and_between_two_calls(looked_at, change):
    net, drops, _ = looked_at
    net.entry.cache, kept = {}, (net.entry.mask, net.entry.weight)
    drops()
    change(net)
    assert kept and drops(False) and not drops(False)


def test_a_model_that_changes_in_each_call_is_looked_at_a_few_times_in_a_run(looked_at, engine):
    net, drops, state = looked_at
    for _ in range(2):
        state.new_run()
        for _ in range(engine("cuda_graphs.model_state").MOST_LOOKS):
            net.entry.mask = torch.zeros(3)
            assert drops(False) and state.obstacle is None
        net.entry.mask = torch.zeros(3)
        assert not drops(False) and "changes in each call" in state.obstacle


FOREIGN = {
    "a hook": lambda net, function: net.blocks[0].register_forward_hook(function),
    "a hook before": lambda net, function: net.blocks[0].register_forward_pre_hook(function),
    "a hook for all": lambda _net, function: nn.modules.module.register_module_forward_hook(function),
    "a forward": lambda net, function: setattr(net.entry, "forward", function),
    "a method": lambda net, function: setattr(net, "method", function),
}


@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_code_of_another_pack_that_comes_between_two_calls(looked_at, put):
    net, drops, state = looked_at
    code = compile("def function(*_args): pass", "/x/custom_nodes/a_pack/nodes.py", "exec")
    names: dict = {}
    exec(code, names)  # noqa: S102
    handle = put(net, names["function"])
    try:
        assert not drops(False) and state.foreign == "a_pack"
    finally:
        if handle is not None:
            handle.remove()


def test_the_hosts_pages_and_our_own_attributes_do_not_count(looked_at):
    net, drops, _ = looked_at
    net.entry.weight_lowvram_function, net.entry.torch_compile_kit_number = (lambda weight: weight), 7
    assert not drops()
    net.entry.weight_lowvram_function, net.entry.torch_compile_kit_number = None, 8
    assert not drops()
    net.entry.mask.fill_(1.0)
    assert not drops(), "nor what is in a tensor"
    net.training_mode = net.training
    assert drops()
    del net.training_mode
    net.entry.in_features = net.entry.in_features
    assert drops() and not drops()


def test_who_makes_layers_does_not_count(looked_at, monkeypatch):
    """PyTorch wraps these methods of all layers when it first compiles (torch/_dynamo/mutation_guard.py)."""
    _, drops, _ = looked_at

    def wrap(name):
        hosts = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, lambda self, *args, **kwargs: hosts(self, *args, **kwargs))

    wrap("__init__")
    wrap("__setstate__")
    assert not drops()
    wrap("__call__")
    assert drops()


def test_a_number_on_the_cpu_is_seen_by_value(looked_at):
    """PyTorch passes it to kernels by value."""
    net, drops, _ = looked_at
    net.entry.scale = torch.tensor(1.0)
    drops()
    net.entry.scale.fill_(2.0)
    assert drops()
