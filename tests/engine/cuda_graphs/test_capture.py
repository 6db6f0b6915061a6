"""Which calls are captured, and what happens when a capture or a replay fails; no GPU takes part."""

import weakref

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference_mode")


class Replaying:
    """Stands in for a captured graph: computes as the call does, or raises what it is told to."""

    error: Exception | None = None

    def __init__(self, forward):
        self.forward = forward

    def replay(self, tensors):
        if self.error is not None:
            raise self.error
        return self.forward(*tensors)


@pytest.fixture
def graphs(engine, monkeypatch):
    kind = engine("cuda_graphs.capture").ModelGraphs

    def capture(self, key, forward, leaves, spec, tensors, fixed):
        self.captures += 1
        self.graphs[key] = Replaying(forward)
        return self.graphs[key]

    monkeypatch.setattr(kind, "_capture", capture)
    found = kind()
    found.model.device = torch.device("cpu")
    return found


def call(graphs, key):
    """A call of a model that doubles; whether it was replayed."""
    before, x = graphs.replays, torch.ones(2)
    assert graphs.call(key, lambda x: x * 2, (x,), {}, {}).tolist() == [2, 2] and x.tolist() == [1, 1]
    return graphs.replays > before


@pytest.mark.parametrize(("busy", "captures"), [("cpu", 0), ("cuda:1", 1)])
def test_a_capture_is_put_off_only_while_code_is_tried_on_its_own_device(graphs, engine, busy, captures):
    """A model on one GPU is captured while kernels are loaded on another one."""
    with engine("compile.traced_graph").gpu_locks[torch.device(busy)]:
        call(graphs, "key"), call(graphs, "key")
        assert graphs.captures == captures
    call(graphs, "key")
    assert graphs.captures == 1


def test_one_model_is_captured_at_a_time_on_whatever_gpu(graphs, engine, monkeypatch):
    kind, seen = engine("cuda_graphs.capture").ModelGraphs, []
    monkeypatch.setattr(kind, "_checked", lambda _graphs, replayed, *_: replayed)  # of tensors without data
    other, capture, x = kind(), kind._capture, torch.ones(2, device="meta")
    other.model.device = x.device

    def call_other():
        for _ in range(2):
            other.call("key", lambda x: x * 2, (x,), {}, {})
        return other.captures

    def meanwhile(self, *args):
        if self is graphs:
            seen.append(call_other())
        return capture(self, *args)

    monkeypatch.setattr(kind, "_capture", meanwhile)
    call(graphs, "key"), call(graphs, "key")
    assert seen == [0] and graphs.captures == 1 and call_other() == 1


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("no room"),
    torch.AcceleratorError("CUDA error: out of memory") if hasattr(torch, "AcceleratorError") else None,
    RuntimeError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("error", [*filter(None, OUT_OF_MEMORY)], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("calls", [1, 3], ids=["after the capture", "later"])
def test_out_of_memory_when_a_graph_is_launched(graphs, monkeypatch, error, calls):
    call(graphs, "other"), call(graphs, "other")
    for _ in range(calls):
        call(graphs, "key")
    with monkeypatch.context() as patch:
        patch.setattr(Replaying, "error", error)
        call(graphs, "key")
    assert not graphs.graphs and str(error) in graphs.failures["key"]
    captures = graphs.captures
    for _ in range(3):
        assert not call(graphs, "key"), "the next calls are plain"
    assert graphs.captures == captures
    graphs.drop()
    call(graphs, "key"), call(graphs, "key")
    assert call(graphs, "key"), "when the weights have moved it is tried again"


def test_memory_that_others_can_give_up_is_asked_for_before_a_capture_and_where_a_replay_lacks_it(graphs, monkeypatch):
    """The driver gives a graph's memory to others between replays."""
    asked, x = [], torch.ones(2)

    def make_room():
        asked.append(graphs.captures)
        Replaying.error = None
        return True

    def run():
        return graphs.call("key", lambda x: x * 2, (x,), {}, {}, make_room=make_room).tolist()

    assert run() == run() == [2, 2] and asked == [0]
    monkeypatch.setattr(Replaying, "error", torch.OutOfMemoryError("no room"))
    assert run() == run() == [2, 2] and asked == [0, 1]
    assert graphs.captures == 1 and graphs.replays == 2 and not graphs.failures


def test_without_room_nothing_is_captured(graphs):
    """In the capture dynamic VRAM would wait for the GPU to take pages: CUDA cannot end such a capture."""
    x, asked = torch.ones(2), []
    for _ in range(4):
        graphs.call("key", lambda x: x * 2, (x,), {}, {}, make_room=lambda: asked.append(1))
    assert len(asked) == 1 and not graphs.captures and graphs.failures == {"key": "too little memory is free"}
    graphs.new_run(False)  # others may have given memory back
    assert graphs.call("key", lambda x: x * 2, (x,), {}, {}).tolist() == [2, 2] and graphs.captures == 1


def test_out_of_memory_is_remembered_in_the_next_run(graphs, monkeypatch):
    """Else each image captures all graphs anew, and fails at the same one again."""
    net, device = torch.nn.Linear(2, 2), torch.device("cpu")
    graphs.drop_if_stale(net, device)
    call(graphs, "small"), call(graphs, "small"), call(graphs, "large")
    with monkeypatch.context() as patch:
        patch.setattr(Replaying, "error", torch.OutOfMemoryError("no room"))
        call(graphs, "large")
    graphs.model.new_run()
    graphs.drop_if_stale(net, device)
    assert "large" in graphs.failures
    call(graphs, "small"), call(graphs, "small")
    captures = graphs.captures
    for _ in range(3):
        graphs.model.new_run()
        graphs.drop_if_stale(net, device)
        assert call(graphs, "small") and not call(graphs, "large")
    assert graphs.captures == captures


def test_a_call_that_cannot_be_captured_is_not_tried_at_each_unloading(engine, monkeypatch):
    graphs, net = engine("cuda_graphs.capture").ModelGraphs(), torch.nn.Linear(2, 2)
    tried, device = [], torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(engine("cuda_graphs.capture"), "capture_stream", lambda device: tried.append(device))

    def run():
        graphs.model.new_run()
        graphs.drop_if_stale(net, device)
        for _ in range(3):
            call(graphs, "key")
        return len(tried)

    assert [run(), run()] == [1, 1] and graphs.failures, "a CPU has no captures"
    graphs.drop()
    assert run() == 1
    net.weight = torch.nn.Parameter(net.weight.clone())
    assert run() == 1, "the weights have moved"
    net.others = [torch.relu, torch.nn.functional.silu]
    assert run() == 2, "it runs other functions"


def test_the_memory_of_graphs_is_given_back_with_their_model(engine, monkeypatch):
    module, given_back = engine("cuda_graphs.capture"), []
    monkeypatch.setattr(module, "give_back", given_back.append)
    net = torch.nn.Linear(2, 2)
    graphs = module.graphs_of(net)
    graphs.model.device = torch.device("cpu")
    graphs.graphs["key"] = Replaying(None)
    del net, graphs
    assert given_back == [torch.device("cpu")]


def test_another_error_of_a_replay_is_the_users_to_see(graphs, monkeypatch):
    call(graphs, "key"), call(graphs, "key")
    monkeypatch.setattr(Replaying, "error", RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        call(graphs, "key")


def test_out_of_memory_for_the_inputs_of_a_graph(engine, monkeypatch):
    graphs = engine("cuda_graphs.capture").ModelGraphs()
    graphs.model.device = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(engine("cuda_graphs.capture"), "capture_stream", lambda device: None)

    def no_room(*_args, **_kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "clone", no_room)
    for _ in range(3):
        call(graphs, "key")
    assert graphs.failures == {"key": "OutOfMemoryError: no room"} and not graphs.graphs


def test_the_graph_that_was_replayed_least_recently_goes(engine, graphs):
    most = engine("cuda_graphs.capture").MAX_GRAPHS
    for key in range(most):
        call(graphs, key), call(graphs, key), call(graphs, key)
    assert call(graphs, 0)
    call(graphs, "new"), call(graphs, "new")
    assert 0 in graphs.graphs and 1 not in graphs.graphs and len(graphs.graphs) == most
    call(graphs, 1)
    assert call(graphs, 1), "it has been of use: it is captured again"


def test_kinds_of_calls_that_take_turns_do_not_push_each_other_out(engine, graphs):
    most = engine("cuda_graphs.capture").MAX_GRAPHS
    replayed = [[call(graphs, key) for key in range(most + 1)] for _ in range(6)]
    assert graphs.captures == most + 1
    assert all(sum(turn) == most for turn in replayed[2:])
    assert "take turns" in graphs.failures[0]


def test_sizes_of_a_warmup_do_not_take_turns_but_those_of_short_prompts_do(engine, graphs):
    """Two steps each, one in which the call is noted and one in which it is captured."""
    most = engine("cuda_graphs.capture").MAX_GRAPHS
    for size in range(most + 2):
        graphs.new_run(is_warming=True)
        call(graphs, size), call(graphs, size)
    graphs.new_run(is_warming=False)
    call(graphs, 0)
    assert call(graphs, 0) and not graphs.failures
    captures = []
    for _ in range(6):
        for size in range(most + 2):
            graphs.new_run(is_warming=False)
            call(graphs, size)
        captures.append(graphs.captures)
    assert captures[-1] == captures[-2] and graphs.failures


def test_what_could_not_be_captured_while_it_was_uncompiled_is_tried_again(engine, graphs, monkeypatch):
    """Uncompiled code of ComfyUI-GGUF makes tensors of lists, which CUDA cannot capture."""
    kind, codes = engine("cuda_graphs.capture").ModelGraphs, [1]
    capture = kind._capture

    def capture_compiled(self, key, *args):
        return self._fails_for_good(key, "copies from RAM") if codes[-1] == 1 else capture(self, key, *args)

    monkeypatch.setattr(kind, "_capture", capture_compiled)

    def run():
        return graphs.call("key", lambda x: x * 2, (torch.ones(2),), {}, {}, code=lambda: codes[-1]).tolist()

    assert [run() for _ in range(3)] == [[2, 2]] * 3 and "key" in graphs.failures and not graphs.captures
    codes.append(2)
    assert [run() for _ in range(3)] == [[2, 2]] * 3 and not graphs.failures and graphs.captures == 1
    graphs._ran_out_of_memory("key", "no room")
    graphs.drop()
    assert not graphs.failures, "what ran out of memory is captured again when the weights have moved"


def test_a_model_may_take_items_out_of_its_inputs(graphs):
    """As Hunyuan-DiT takes a ControlNet's outputs, in the two calls that are compared with replays, too."""
    told = []

    def forward(x, control):
        return x + (control.pop() if isinstance(control, list) else control)  # the stand-in for a graph has tensors

    for _ in range(3):
        x, control = torch.ones(2), [torch.ones(2)]
        graphs.is_check_due = True
        pays = lambda cost, saved: told.append(saved)  # noqa: E731
        assert graphs.call("key", forward, (x, control), {}, {}, pays=pays).tolist() == [2, 2]
    assert told


def test_what_is_remembered_of_calls_has_an_end(engine, graphs, monkeypatch):
    module = engine("cuda_graphs.capture")
    monkeypatch.setattr(module, "MAX_OTHERS", 20)
    for key in range(60):
        call(graphs, key), call(graphs, key)
    assert len(graphs.seen) <= 20 and len(graphs.failures) <= 20 and len(graphs._never_replayed) <= module.MAX_GRAPHS


RESULTS = {
    "the same": (torch.ones(4), True),
    "rounded": (torch.ones(4) * 1.003, True),
    "another": (torch.ones(4) * 1.01, False),
    "not finite": (torch.tensor([torch.inf, 1, 1, 1]), False),
    "of another size": (torch.ones(5), False),
    "in a tuple": ((torch.ones(4), 2), True),
    "nothing where the other has nothing": (torch.zeros(4), True),
}


@pytest.mark.parametrize("replayed, is_right", RESULTS.values(), ids=RESULTS)
def test_a_replay_is_compared_with_a_plain_call_after_its_capture(graphs, monkeypatch, replayed, is_right):
    right = torch.zeros(4) if isinstance(replayed, torch.Tensor) and not replayed.any() else torch.ones(4)
    expected = (right, 2) if isinstance(replayed, tuple) else right
    monkeypatch.setattr(Replaying, "replay", lambda _graph, _tensors: replayed)
    calls = []

    def call():
        state = torch.random.get_rng_state()
        result = graphs.call("key", lambda _x: (calls.append(torch.rand(1)), expected)[1], (torch.ones(2),), {}, {})
        return result, torch.equal(state, torch.random.get_rng_state())

    call()
    result, draws_nothing = call()
    assert draws_nothing, "numbers of the second call of the two are drawn beside the others"
    assert result is (replayed if is_right else expected) and (graphs.checks, graphs.differences) == (1, not is_right)
    assert len(calls) == 2
    call()
    assert len(calls) == (2 if is_right else 3), "only once; or it runs plainly"
    if is_right:
        graphs.is_check_due = True
        call()
        assert len(calls) == 3 and graphs.checks == 2


def test_memory_of_a_wrong_graph_is_given_back_when_nothing_holds_it(engine, graphs, monkeypatch):
    """Else the driver keeps it for good."""
    held, are_gone = [], []

    def replay(self, _tensors):
        held.append(weakref.ref(self))
        return torch.zeros(4)

    monkeypatch.setattr(Replaying, "replay", replay)
    monkeypatch.setattr(engine("cuda_graphs.capture"), "give_back", lambda _device: are_gone.append(held[0]() is None))
    for _ in range(2):
        assert graphs.call("key", lambda _x: torch.ones(4), (torch.ones(2),), {}, {}).all()
    assert graphs.differences == 1 and are_gone == [True]


@pytest.mark.parametrize("arrives", ["before the plain call", "in it"])
def test_a_replay_is_not_compared_with_code_that_the_graph_lacks(graphs, monkeypatch, arrives):
    """Captured while blocks were compiled, it has their operators, and rounds in other places."""
    monkeypatch.setattr(Replaying, "replay", lambda _graph, _tensors: torch.ones(4))
    calls, state = [], {"is_compiling": False, "code": 1}

    def forward(_x):
        calls.append(1)
        if len(calls) == 2 and arrives == "in it":
            state["code"] = 2
        return torch.ones(4) * 1.01

    def call():
        return graphs.call(
            *("key", forward, (torch.ones(2),), {}, {}),
            code=lambda: state["code"],
            is_compiling=lambda: state["is_compiling"],
        )

    call()
    state["is_compiling"] = arrives == "before the plain call"
    assert torch.equal(call(), torch.ones(4)) and graphs.is_check_due and graphs.differences == 0
    state["is_compiling"] = False
    if arrives == "before the plain call":
        call()
        assert graphs.differences == 1, "the check comes later"


def test_a_call_that_lacks_a_trace_is_not_captured(graphs, monkeypatch):
    """A replay traces nothing: its uncompiled operators would run for good."""
    monkeypatch.setattr(Replaying, "replay", lambda _graph, _tensors: torch.ones(4))
    lacks = [True, True, False, False]

    def call():
        lacking = lacks.pop(0)
        graphs.call("key", lambda _x: torch.ones(4), (torch.ones(2),), {}, {}, lacks_trace=lambda: lacking)
        return graphs.captures

    assert [call() for _ in range(4)] == [0, 0, 0, 1]


def test_without_memory_for_a_check_the_replay_is_the_result(graphs, monkeypatch):
    replayed, calls = torch.ones(2), []
    monkeypatch.setattr(Replaying, "replay", lambda _graph, _tensors: replayed)

    def forward(x):
        if calls:
            raise torch.OutOfMemoryError("no room")
        calls.append(1)
        return x

    graphs.call("key", forward, (replayed,), {}, {})
    assert graphs.call("key", forward, (replayed,), {}, {}) is replayed and graphs.graphs and graphs.checks == 0
