"""Keys of what CUDA graphs depend on, and on which device and stream they are captured."""

import contextlib
import enum
import functools
import gc
import types
import weakref

import pytest
import torch


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


def closure_over(value):
    def function():
        return value

    return function


EQUAL = {
    "numbers": lambda: (1, 2.5, True, None, "x", b"y", 1j),
    "containers": lambda: {"a": [1, (2, {3})], "b": {"c": torch.float16, "d": torch.device("cuda", 1)}},
    "an enumeration": lambda: [Size.SMALL, torch.nn.attention.SDPBackend.MATH],
    "classes, modules and built-in functions": lambda: (dict, types, len, torch.relu),
    "a function": lambda: closure_over,
    "a partial": lambda: functools.partial(closure_over, 2, value=[3]),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_for_what_is_the_same(engine, make):
    key = engine("cuda_graphs.keys").value_key
    assert key(make()) == key(make()) and hash(key(make())) == hash(key(make()))


DIFFERENT = [
    (1, 1.0), (1, True), (0.0, -0.0), ("1", 1), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: "x"}, {"1": "x"}),
    (Size.SMALL, Size.LARGE), (torch.float16, torch.bfloat16), ([None], []), (closure_over(1), closure_over(1)),
    (functools.partial(closure_over, 1), functools.partial(closure_over, 2)), (torch.Size([1]), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("one, other", DIFFERENT, ids=lambda value: str(value).partition(" at 0x")[0])
def test_different_for_what_a_call_can_tell_apart(engine, one, other):
    key = engine("cuda_graphs.keys").value_key
    assert key(one) != key(other)


def test_what_is_changed_in_place_has_another_key(engine):
    key, options, held = engine("cuda_graphs.keys").value_key, {"a": [1]}, [1]
    function = closure_over(held)
    before = key(options), key(function)
    options["a"].append(2)
    held.append(2)
    assert key(options) != before[0] and key(function) != before[1]


class Odd:
    def __call__(self):
        return 1


ring = []
ring.append(ring)
NO_KEY = [
    Odd(), Odd().__call__, [Odd()], {"a": Odd()}, closure_over(Odd()), functools.partial(Odd()), ring, torch.zeros(1),
    closure_over(torch.zeros(1)), torch.nn.Identity(), types.SimpleNamespace(a=1), {Odd(): 1},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_KEY, ids=lambda value: type(value).__name__)
def test_no_key_for_what_may_change_unseen(engine, value):
    keys = engine("cuda_graphs.keys")
    with pytest.raises(keys.NoKey):
        keys.value_key(value)


def test_of_inputs_the_data_do_not_count(engine):
    keys = engine("cuda_graphs.keys")

    def key(tensor, **others):
        return keys.value_key(([tensor], others), inputs=True)

    assert key(torch.zeros(2, 3)) == key(torch.ones(2, 3))
    others = [torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3).half(), torch.zeros(2, 3, device="meta")]
    assert len({key(tensor) for tensor in [torch.zeros(2, 3), *others]}) == 5
    assert key(torch.zeros(1), a=1) != key(torch.zeros(1), a=2)
    for hidden in (closure_over(torch.zeros(1)), functools.partial(print, torch.zeros(1)), torch.zeros(1).as_subclass(Packed)):
        with pytest.raises(keys.NoKey):
            key(torch.zeros(1), hidden=hidden)


class Packed(torch.Tensor):
    """A tensor class of another pack."""


@pytest.fixture
def devices(engine, monkeypatch):
    """PyTorch's functions for captures, which note what they are asked for; needs no GPU."""
    current, said, mode = [torch.device("cuda", 0)], [], [0]

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    @contextlib.contextmanager
    def graph(_graph, pool, stream, capture_error_mode):
        said.append(("capture", stream, current[-1]))
        yield

    class CUDAGraph:
        def replay(self):
            said.append(("replay", current[-1]))

    for name, value in {
        "device": device, "graph": graph, "CUDAGraph": CUDAGraph, "Stream": lambda device: f"a stream of {device}",
        "graph_pool_handle": object, "synchronize": lambda device: said.append(("synchronize", device)),
        "get_sync_debug_mode": lambda: mode[-1], "set_sync_debug_mode": mode.append, "device_count": lambda: 1,
        "current_stream": lambda: "the stream of the call",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    module = engine("cuda_graphs.capture")
    module.capture_stream.cache_clear()
    yield said
    module.capture_stream.cache_clear()


def test_each_device_captures_on_a_stream_of_its_own(engine, devices):
    for index in (0, 1):
        there = torch.device("cuda", index)
        graphs = engine("cuda_graphs.capture").ModelGraphs()
        graphs.model.device = there
        x = torch.ones(2)
        captured = graphs._capture("key", lambda x: x + 1, [x], _spec((x,)), [x], {})
        assert captured.replay([x]).tolist() == [2, 2]
        assert devices == [("synchronize", there), ("capture", f"a stream of {there}", there), ("replay", there)]
        devices.clear()


@pytest.mark.parametrize(("gpus", "mode"), [(1, "error"), (2, 0)])
def test_what_waits_for_the_gpu_raises_in_a_capture(engine, devices, monkeypatch, gpus, mode):
    """For the process, so not beside another GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    graphs, seen, x = engine("cuda_graphs.capture").ModelGraphs(), [], torch.ones(2)
    graphs.model.device = torch.device("cuda", 0)
    assert graphs._capture("key", lambda x: seen.append(torch.cuda.get_sync_debug_mode()) or x, [x], _spec((x,)), [x], {})
    assert seen == [mode] and torch.cuda.get_sync_debug_mode() == 0


@pytest.fixture
def endless(engine, devices, monkeypatch):
    """Captures that cannot be ended; the streams that were left, and what is kept for ever."""
    module, left = engine("cuda_graphs.capture"), []

    class Graph:
        def __init__(self, _graph, pool, stream, capture_error_mode):
            self.stream_ctx = contextlib.ExitStack()
            self.stream_ctx.callback(left.append, stream)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

        def __enter__(self): ...

        def __exit__(self, *_):
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(module, "_never_allocated", kept := [])
    return left, kept


def test_a_capture_that_cannot_be_ended_leaves_its_stream_and_frees_nothing(engine, endless):
    graphs, x, result = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2), torch.zeros(3)
    graphs.model.device = torch.device("cuda", 0)
    assert graphs._capture("key", lambda _x: result, [x], _spec((x,)), [x], {}) is None
    left, kept = endless
    assert left == ["a stream of cuda:0"] and kept[0][1] is result and "previous error" in graphs.failures["key"]


class Failing(torch.nn.Linear):
    """As a layer that waits for the GPU; it keeps some of what it computes."""

    def forward(self, x):
        self.cached, unused = x + 1, x + 2
        raise RuntimeError(f"waits for {unused.sum()}")


def test_a_failed_capture_keeps_the_memory_that_it_has_allocated_and_not_the_model(engine, endless, monkeypatch):
    module, kept = engine("cuda_graphs.capture"), endless[1]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    graphs, x, net = module.ModelGraphs(), torch.ones(2), Failing(2, 2)
    graphs.model.device = x.device
    older = {tensor.data_ptr() for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter)}
    allocated = []
    monkeypatch.setattr(module, "_is_allocated", lambda address: address in older or allocated.append(address))
    gc.disable()
    try:
        assert graphs._capture("key", net, [x], _spec((x,)), [x], {}) is None
        assert "waits for" in graphs.failures["key"]
        gone = weakref.ref(net)
        cached = net.cached.data_ptr()
        del net
        assert gone() is None, "without a collector of garbage"
    finally:
        gc.enable()
    memory = [storage.data_ptr() for storage in kept[0][2]]
    assert sorted(memory) == sorted(allocated) and cached in memory and len(memory) == 3, "of the copy of x as well"


def _spec(args):
    return torch.utils._pytree.tree_flatten((args, {}))[1]


def test_the_order_of_attributes_does_not_count(engine):
    """The host removes attributes of a layer and puts them back."""
    layer = torch.nn.Linear(2, 2)
    layer.first, layer.second = 1, 2
    held = engine("cuda_graphs.keys").HeldValues([layer])
    before = held.key()
    del layer.first
    assert held.key() != before
    layer.first = 1
    assert held.key() == before
