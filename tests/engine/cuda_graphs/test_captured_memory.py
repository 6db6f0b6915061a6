"""A capture of a call: its stream, its memory, what it leaves when it fails; no GPU takes part."""

import contextlib
import gc
import weakref

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference_mode")


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
        "get_sync_debug_mode": lambda: mode[-1], "set_sync_debug_mode": mode.append,
        "current_stream": lambda: "the stream of the call",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    module = engine("cuda_graphs.capture")
    monkeypatch.setattr(module, "allocate_workspaces", lambda stream: None)
    monkeypatch.setattr(module, "others_in_use", lambda device: [])
    module.capture_stream.cache_clear()
    yield said
    module.capture_stream.cache_clear()


def capture(engine, graphs, model, x, like=None):
    """What a call is captured as that has run before with a result as `like`, or as `x`."""
    if not torch.backends.cuda.is_built():
        pytest.skip("PyTorch is built without CUDA, and asks its allocator")
    graphs.seen["key"] = engine("cuda_graphs.capture")._without_data(x if like is None else like)
    return graphs._capture("key", model, [x], torch.utils._pytree.tree_flatten(((x,), {}))[1], [x], {})


def test_each_device_captures_on_a_stream_of_its_own(engine, devices):
    for index in (0, 1):
        there = torch.device("cuda", index)
        graphs = engine("cuda_graphs.capture").ModelGraphs()
        graphs.model.device = there
        x = torch.ones(2)
        captured = capture(engine, graphs, lambda x: x + 1, x)
        assert captured.replay([x]).tolist() == [2, 2]
        assert devices == [("synchronize", there), ("capture", f"a stream of {there}", there), ("replay", there)]
        devices.clear()


@pytest.mark.parametrize(("others", "mode"), [([], "error"), ([torch.device("cuda", 1)], 0)])
def test_what_waits_for_the_gpu_raises_in_a_capture(engine, devices, monkeypatch, others, mode):
    """For the process, so not if it uses another GPU as well."""
    monkeypatch.setattr(engine("cuda_graphs.capture"), "others_in_use", lambda device: others)
    graphs, seen, x = engine("cuda_graphs.capture").ModelGraphs(), [], torch.ones(2)
    graphs.model.device = torch.device("cuda", 0)
    assert capture(engine, graphs, lambda x: seen.append(torch.cuda.get_sync_debug_mode()) or x, x)
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
    monkeypatch.setattr(module, "_kept_for_good", kept := [])
    return left, kept


@pytest.fixture
def allocating(engine, devices, monkeypatch):
    """As under cudaMallocAsync, whose driver does not know what a capture has allocated; returns what is kept for good."""
    module = engine("cuda_graphs.capture")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    older = {tensor.data_ptr() for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, torch.nn.Parameter)}
    recording = module._recording

    @contextlib.contextmanager
    def record(*args):
        with recording(*args):
            older.update(t.data_ptr() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
            yield

    monkeypatch.setattr(module, "_recording", record)
    monkeypatch.setattr(module, "_is_allocated", older.__contains__)
    monkeypatch.setattr(module, "_kept_for_good", kept := [])
    return kept


def test_a_capture_that_cannot_be_ended_leaves_its_stream_and_frees_nothing(engine, endless, allocating, monkeypatch):
    graphs, x = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2)
    graphs.model.device = x.device
    monkeypatch.setattr(engine("cuda_graphs.capture"), "_may_free", lambda stream: False)
    assert capture(engine, graphs, lambda x: x + 1, x) is None
    left, _ = endless
    (kept,) = allocating
    assert left == ["a stream of cpu"] and "previous error" in graphs.failures["key"]
    assert [storage.nbytes() for storage in kept[1]] == [8], "the result"


class Model(torch.nn.Linear):
    """A layer, and what it does with some of what it computes."""

    def __init__(self, does):
        super().__init__(2, 2)
        self.does, self.kept = does, []

    def forward(self, x):
        hidden, unused = x + 1, x + 2
        self.does(self, hidden)
        return hidden + unused


def keeps(model, hidden):
    model.kept.append(hidden)


def fails(model, hidden):
    raise RuntimeError(f"waits for {hidden.sum()}")


def keeps_and_fails(model, hidden):
    keeps(model, hidden)
    try:
        fails(model, hidden)
    except RuntimeError as error:
        raise ValueError("not like this") from error


def leaves_garbage(_model, hidden):
    cycle = [hidden]
    cycle.append(cycle)


@pytest.mark.parametrize(
    ("does", "outcome", "left"),
    [
        (lambda *_: None, "a graph", 0),
        (leaves_garbage, "a graph", 0),
        (keeps, "a graph for this call alone", 1),
        (fails, "no graph", 0),
        (keeps_and_fails, "no graph", 1),
    ],
    ids=["all is freed", "garbage", "keeps", "fails", "keeps and fails"],
)
def test_what_a_capture_has_allocated_is_freed_in_it_or_never(engine, allocating, does, outcome, left):
    module, x, model = engine("cuda_graphs.capture"), torch.ones(2), Model(does)
    graphs = module.ModelGraphs()
    graphs.model.device = x.device
    gc.collect()
    gc.disable()  # the collector may not decide
    try:
        captured = capture(engine, graphs, model, x)
        assert [len(storages) for _graph, storages in allocating] == [left] * (left > 0)
        assert (captured is not None) == (outcome != "no graph") and ("key" in graphs.graphs) == (outcome == "a graph")
        assert ("key" in graphs.failures) == (outcome != "a graph")
        if left:
            assert allocating[0][1][0].data_ptr() == model.kept[0].data_ptr()
        if captured is not None:
            assert captured.replay([x]).tolist() == [5, 5]
        gone = weakref.ref(model)
        del model
        assert gone() is None, "without a collector of garbage"
    finally:
        gc.enable()


def test_garbage_is_not_collected_in_a_capture(engine, devices):
    graphs, x, seen = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2), []
    graphs.model.device = x.device
    assert gc.isenabled() and capture(engine, graphs, lambda x: seen.append(gc.isenabled()) or x, x)
    assert seen == [False] and gc.isenabled()


def test_a_trace_for_another_gpu_that_outlasts_a_capture_leaves_the_collector_on(engine, devices):
    graphs, x, scope = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2), engine("compile.session").tracing_scope
    graphs.model.device = x.device
    try:
        assert capture(engine, graphs, lambda x: scope.enter(gc=False) or x, x)
        scope.exit()
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("like", [torch.ones(3), torch.ones(2).half(), [torch.ones(2)] * 2, []], ids=str)
def test_a_result_of_another_kind_than_before_is_not_captured(engine, devices, like):
    graphs, x = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2)
    graphs.model.device = x.device
    assert capture(engine, graphs, lambda x: x, x, like) is None and "other tensors" in graphs.failures["key"]


def test_no_local_of_an_error_that_is_being_handled_elsewhere_is_dropped(engine, devices):
    """The call may be another node's answer to it."""
    graphs, x = engine("cuda_graphs.capture").ModelGraphs(), torch.ones(2)
    graphs.model.device = x.device

    def fail(local):
        raise KeyError(local)

    try:
        fail("theirs")
    except KeyError as theirs:
        assert capture(engine, graphs, Model(fails), x) is None
        assert theirs.__traceback__.tb_next.tb_frame.f_locals == {"local": "theirs"}
