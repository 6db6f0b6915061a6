"""Code made in the background: calls run eager until it is ready, then find it; nothing else is touched by it."""

import functools
import gc
import sys
import threading
import time

import pytest
import torch
from support import Block, Counting, CountingInAList, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def behind(engine):
    """behind(net, *args, **settings): a call of the model that waits for nothing; its result, and whether it ran eager."""
    calls, compiler = engine("background.model_call"), engine("background.thread").compiler

    def run(net, *args, waits=False, **chosen):
        settings = engine("settings").CompileSettings(**{"backend": "eager", **chosen})
        call = calls.ModelCall(waits=waits)
        with engine("compile.events").watching, engine("compile.binding").compiled_blocks(net, settings, call):
            return net(*args[:1], **(args[1] if len(args) > 1 else {})), bool(call.eager)

    yield run
    assert compiler.wait(60)


@pytest.fixture
def made(engine):
    """made(net): waits for the thread; the number of graphs that there are then."""

    def wait(net):
        assert engine("background.thread").compiler.wait(120)
        return sum(group.stats.graphs for group in engine("compile.registry").code_of(net).groups.values())

    return wait


def test_nothing_is_captured_while_there_is_code_that_has_not_been_tried(behind, made, engine, monkeypatch):
    """PyTorch lets other threads find code as soon as it is compiled; its kernels are loaded when it first runs."""
    backends, found, locked = engine("inductor.run_modes"), torch._C._dynamo.eval_frame._debug_get_cache_entry_list, []
    net, x = Net(), torch.randn(2, 4, 8)

    def tries(_compiled, _args):
        (group,) = engine("compile.registry").code_of(net).groups.values()
        locked.append((len(found(group.code._own.__code__)), backends.gpu_lock.locked()))

    monkeypatch.setattr(backends, "_try_kernels", tries)
    behind(net, x)
    assert made(net) == 1 and locked == [(1, True)]
    assert not backends.gpu_lock.locked()


@pytest.mark.parametrize("waits", [False, True])
def test_code_that_is_being_tried_is_run_by_nobody_else(behind, made, engine, monkeypatch, waits):
    """Else the other thread's measuring unloads kernels that this one runs: `load_kernel() must be called before run()`."""
    backends, trying, go_on = engine("inductor.run_modes"), threading.Event(), threading.Event()
    compiler, order = engine("background.thread").compiler, []

    def tries(_compiled, _args):
        trying.set()
        assert go_on.wait(60)
        order.append("tried")

    monkeypatch.setattr(backends, "_try_kernels", tries)
    net, x = Net(), torch.randn(2, 4, 8)
    expected = net(x)
    behind(net, x)
    assert trying.wait(60)
    if waits:
        threading.Timer(0.2, go_on.set).start()
        result, eager = behind(net, x, waits=True)
        assert order == ["tried"] and not eager and torch.equal(result, expected)
        return
    result, eager = behind(net, x)
    assert eager and torch.equal(result, expected) and compiler.busy and not order, "who need not wait runs eager"
    go_on.set()
    assert made(net) == 1
    result, eager = behind(net, x)
    assert not eager and torch.equal(result, expected)


def test_memory_that_is_short_postpones_it(behind, made, engine, monkeypatch):
    background, tries = engine("background.thread"), []
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    monkeypatch.setattr(background, "_has_room", lambda _job: tries.append(1) or len(tries) > 3)
    net, x = Net(), torch.randn(2, 4, 8)
    behind(net, x)
    assert made(net) == 1 and len(tries) == 4


def test_it_never_waits_for_the_allocator_with_pythons_lock_in_hand(behind, made, engine, monkeypatch):
    """comfy-aimdo waits for Python's lock inside PyTorch's allocator: both would wait for good."""
    asked, stand_in = [], engine("background.stand_in").StandIn
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: {})
    original = stand_in.made

    def asking(self):
        try:
            torch.cuda.memory.memory_stats_as_nested_dict()
        except RuntimeError as error:
            asked.append(str(error))
        return original(self)

    monkeypatch.setattr(stand_in, "made", asking)
    net, x = Net(), torch.randn(2, 4, 8)
    behind(net, x)
    assert made(net) == 1 and len(asked) == 1 and "no statistics" in asked[0]
    assert torch.cuda.memory.memory_stats_as_nested_dict() == {}, "others may"


def test_a_host_that_makes_room_is_not_asked_for_any(behind, made, engine, monkeypatch):
    background = engine("background.thread")
    monkeypatch.setattr(background, "_has_room", lambda _job: False)
    monkeypatch.setattr(background.compiler, "makes_room", lambda: True)
    net, x = Net(), torch.randn(2, 4, 8)
    behind(net, x)
    assert made(net) == 1


def test_pythons_switch_interval_is_as_found_when_the_thread_is_over(behind, made, engine):
    """Also where the next thread begins at once: it is no thread's own."""
    compiler, before, seen = engine("background.thread").compiler, sys.getswitchinterval(), []
    for _ in range(3):
        net = Net()
        behind(net, torch.randn(2, 4, 8))
        while compiler.busy:
            seen.append(sys.getswitchinterval())
        assert sys.getswitchinterval() == before
    assert min(seen) < before


def test_python_begins_no_full_collection_beside_the_thread_nor_until_the_host_rests(behind, made, engine, monkeypatch):
    """One stops every thread of a server for a third of a second."""
    compiler, gate = engine("background.thread").compiler, engine("background.gate").gate
    before, seen, busy = gc.get_threshold(), [], [True]
    monkeypatch.setattr(gate, "is_busy", lambda: busy[0])
    net = Net()
    behind(net, torch.randn(2, 4, 8))
    gate.open()
    while compiler.busy:
        seen.append(gc.get_threshold())
    put_off = (*before[:2], 2**30)
    assert made(net) == 1 and set(seen[seen.index(put_off) :]) == {put_off}
    assert gc.get_threshold() == put_off, "the host has not come to rest"
    busy[0] = False
    end = time.monotonic() + 10
    while gc.get_threshold() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert gc.get_threshold() == before


def test_an_error_of_the_thread_itself_ends_nothing(behind, made, engine, monkeypatch):
    net, x = Net(), torch.randn(2, 4, 8)
    stand_in = engine("background.stand_in").StandIn
    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "made", lambda _self: 1 / 0)
        behind(net, x)
        assert made(net) == 0
    behind(net, x)
    assert made(net) == 1


def test_a_stand_in_has_the_forms_and_none_of_the_data(engine):
    block = Block().requires_grad_(False)
    wide = torch.randn(2, 3, 8).transpose(0, 1)
    found, args, kwargs = engine("background.stand_in").StandIn(block, (wide, wide), {"scale": torch.ones(1).expand(3)}).made()
    assert type(found) is Block and found is not block and found.inner is not block.inner
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in block.named_parameters()]
    for mine, theirs in zip(found.parameters(), block.parameters(), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype, type(mine)) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            type(theirs),
        )
        assert mine.data_ptr() != theirs.data_ptr() and mine.is_inference() == theirs.is_inference()
    assert args[0] is args[1] and args[0].stride() == wide.stride() and kwargs["scale"].stride() == (0,)
    assert len({p.untyped_storage().data_ptr() for p in found.parameters()}) == 1
    assert len({t.untyped_storage().data_ptr() for t in [*found.parameters(), args[0], kwargs["scale"]]}) == 3


def _decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@_decorated
def known_by_name(x):
    return x


def test_functions_in_a_stand_in(engine):
    """Those that a call makes are copied, whatever they close over; others stay themselves, by which PyTorch may know them."""

    def itself(n):
        return (itself, kept, later, n)

    kept, marked = torch.ones(3, 2), torch._dynamo.disable(lambda: kept)
    given = (itself, [itself, marked], known_by_name, torch.nn.functional.max_pool2d)
    block, (copy, (same, also_marked), *others), _ = engine("background.stand_in").StandIn(Block(), given, {}).made()
    assert isinstance(block, Block) and others == [known_by_name, torch.nn.functional.max_pool2d]
    assert copy is same is not itself and copy.__code__ is itself.__code__ and copy.__qualname__ == itself.__qualname__
    with pytest.raises(NameError, match="later"):
        copy(1)
    later = 2
    again, tensor, number, _ = engine("background.stand_in").StandIn(Block(), given, {}).made()[1][0](1)
    assert number == later and again.__code__ is copy.__code__
    assert tensor.shape == kept.shape and not tensor.any(), "its form alone"
    assert also_marked._torchdynamo_disable


@pytest.mark.parametrize(("block", "found"), [(Counting, True), (CountingInAList, False)])
def test_kernels_are_tried_on_nobodys_tensors(behind, made, engine, monkeypatch, block, found):
    """On a GPU, beside a sampler that goes on: what a block keeps is not to count a call more."""
    backends, tried = engine("inductor.run_modes"), []

    def tries(_compiled, args):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        tried.append((len(tensors), all(map(backends.state.may_be_written, tensors))))

    monkeypatch.setattr(backends, "_try_kernels", tries)
    net = Net(block=block)
    behind(net, torch.randn(2, 4, 8))
    assert made(net) == 1
    ((count, may_be),) = tried
    assert count > 3 and may_be is found


def test_with_tf32_it_is_waited_for_code(engine):
    settings = engine("settings").CompileSettings
    assert settings(allow_tf32=True).waits and not settings().waits
