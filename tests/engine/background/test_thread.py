"""Code made in the background: calls run eager until it is ready, then find it; nothing else is touched by it."""

import functools
import gc
import random
import sys
import threading
import time
import types
import weakref

import pytest
import torch
from support import Block, Net, torch_settings

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


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_calls_run_eager_until_their_code_is_there(behind, made, backend):
    net, x = Net(), torch.randn(2, 4, 8)
    expected = net(x)
    result, eager = behind(net, x, backend=backend)
    assert eager and torch.equal(result, expected)
    assert made(net) == 1
    result, eager = behind(net, x, backend=backend)
    assert not eager and torch.allclose(result, expected, atol=1e-5)
    result, eager = behind(net, torch.randn(3, 6, 8), backend=backend)
    assert not eager, "one code for all sizes"
    _, eager = behind(net, torch.randn(1, 6, 8), backend=backend)
    assert eager and made(net) == 2
    assert not behind(net, torch.randn(1, 9, 8), backend=backend)[1] and made(net) == 2


def test_who_waits_uses_what_was_made_and_the_other_way_round(behind, made):
    net, x = Net(), torch.randn(2, 4, 8)
    behind(net, x)
    assert made(net) == 1
    behind(net, x, waits=True)
    assert made(net) == 1
    other, y = Net(width=16), torch.randn(2, 4, 16)
    behind(other, y, waits=True)
    assert made(other) == 1
    assert not behind(other, y)[1] and made(other) == 1


def test_a_kind_does_not_change_over_in_the_middle_of_a_call(behind, engine, made):
    ran = []

    class Noting(Block):
        def forward(self, x):
            note(torch.compiler.is_compiling())
            return super().forward(x)

    compiler = engine("background.thread").compiler

    @torch._dynamo.disable
    def wait():
        compiler.wait(60)

    def note(compiling):
        if not compiling:
            wait()  # the code is ready before the second block runs
            ran.append("eager")

    net, x = Net(block=Noting), torch.randn(2, 4, 8)
    behind(net, x)
    assert ran == ["eager"] * 3
    assert made(net) == 1 and not behind(net, x)[1] and len(ran) == 3


def test_a_patch_asks_for_code_of_its_own_and_counts_from_its_first_call(behind, made):
    net, x = Net(), torch.randn(2, 4, 8)
    patched = {"transformer_options": {"patches": {"attn1_output_patch": [lambda y, _options: y * 2]}}}
    expected = net(x, **patched)
    behind(net, x)
    made(net)
    for _ in range(3):
        result, _ = behind(net, x, patched)
        assert torch.equal(result, expected)
        made(net)
    assert not behind(net, x, patched)[1]
    assert torch.equal(behind(net, x)[0], net(x))


def test_a_number_of_a_patch_that_differs_for_each_step_needs_two_codes(behind, made, engine):
    net, x = Net(), torch.randn(2, 4, 8)
    for step in range(8):
        options = {"patches": {"attn1_output_patch": [Times(float(step + 2))]}}
        result, eager = behind(net, x, {"transformer_options": options})
        made(net)
        assert torch.allclose(result, net(x, transformer_options=options))
        assert eager == (step < 2), "the second code takes the number as it comes"
    assert made(net) == 2


def code_that_multiplies(factor):
    """A patch with a code of its own, in no module."""
    code = (lambda y, _options: y * 0.5).__code__
    return types.FunctionType(code.replace(co_consts=tuple(factor if c == 0.5 else c for c in code.co_consts)), {})


@pytest.mark.parametrize("waits", [False, True])
def test_a_patch_that_is_other_code_for_each_step_is_given_up(behind, made, engine, waits):
    net, x = Net(), torch.randn(2, 4, 8)
    for step in range(12):
        options = {"patches": {"attn1_output_patch": [code_that_multiplies(step + 2.0)]}}
        result, _ = behind(net, x, {"transformer_options": options}, waits=waits)
        made(net)
        assert torch.allclose(result, net(x, transformer_options=options))
    limit, groups = engine("compile.group").PATCH_VARIANTS, engine("compile.registry").code_of(net).groups.values()
    assert made(net) <= limit + 1
    assert any(group.failure for group in groups if group.patches)


def test_patches_that_are_used_are_not_given_up_however_many(behind, made, engine):
    """A user who tries strengths: each runs more than one step."""
    net, x = Net(), torch.randn(2, 4, 8)
    for tried in range(7):
        options = {"patches": {"attn1_output_patch": [code_that_multiplies(tried + 2.0)]}}
        for _ in range(2):
            _, eager = behind(net, x, {"transformer_options": options})
            made(net)
        assert not eager


class Times:
    """A patch whose factor is a constant of its code."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, y, _options):
        return y * self.factor


def test_random_states_and_settings_are_left_alone(behind, made, engine):
    """PyTorch puts random states back when it has compiled; what others have drawn meanwhile must stay drawn."""
    net, x, entered, go_on = Net(), torch.randn(2, 4, 8), threading.Event(), threading.Event()

    def backend(graph, _inputs):
        entered.set()
        assert go_on.wait(60)
        return graph

    torch._dynamo.register_backend(backend, name="waits_for_the_test")
    before = torch_settings()
    settings = engine("settings").CompileSettings(backend="eager")
    object.__setattr__(settings, "backend", "waits_for_the_test")
    with (
        engine("compile.events").watching,
        engine("compile.binding").compiled_blocks(net, settings, engine("background.model_call").ModelCall(False)),
    ):
        net(x)
    assert entered.wait(60)
    torch.manual_seed(7)
    random.seed(7)
    drawn, python = torch.randn(4), random.random()
    go_on.set()
    made(net)
    assert not torch.equal(torch.randn(4), drawn) and random.random() != python
    assert torch_settings() == before


def test_a_model_that_goes_is_not_kept(behind, made, engine):
    net = Net()
    gone = weakref.ref(net), weakref.ref(net.blocks[0].inner.weight)
    behind(net, torch.randn(2, 4, 8))
    del net
    gc.collect()
    assert engine("background.thread").compiler.wait(60)
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_code_that_is_no_single_graph_is_made_when_it_is_called(behind, made):
    class Breaking(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    net, x = Net(block=Breaking), torch.randn(2, 4, 8)
    expected = net(x)
    assert torch.equal(behind(net, x)[0], expected)
    made(net)
    assert torch.equal(behind(net, x)[0], expected)
    assert made(net) >= 1


def test_what_cannot_be_compiled_is_said_and_runs_eager(behind, made, engine, caplog):
    def failing(_graph, _inputs):
        raise ValueError("no such kernel")

    torch._dynamo.register_backend(failing, name="fails_in_the_background")
    settings = engine("settings").CompileSettings(backend="eager")
    object.__setattr__(settings, "backend", "fails_in_the_background")
    net, x = Net(), torch.randn(2, 4, 8)
    for _ in range(2):
        with (
            engine("compile.events").watching,
            engine("compile.binding").compiled_blocks(net, settings, engine("background.model_call").ModelCall(False)),
        ):
            assert torch.equal(net(x), Net.forward(net, x))
        made(net)
    (group,) = engine("compile.registry").code_of(net).groups.values()
    assert group.failure is not None and "no such kernel" in group.failure.message()
    assert len([r for r in caplog.records if "could not be compiled" in r.getMessage()]) == 1


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


def test_a_block_that_works_in_place_on_halves_of_its_precision(behind, made):
    """PyTorch compiles for memory that two arguments share, if one is written to: stand-ins must share none."""

    class InPlace(Block):
        def forward(self, x, context):
            x += self.inner(self.norm(x))
            context.mul_(2.0)
            return x + context.to(x.dtype).mean()

    class Two(Net):
        def forward(self, x, context):
            for block in self.blocks:
                x = block(x, context=context)
            return x

    net = Two(block=InPlace)
    given = torch.randn(2, 4, 8), torch.randn(2, 3, 8).bfloat16()
    expected = net(given[0].clone(), given[1].clone())
    for eager in (True, False):
        result, found = behind(net, given[0].clone(), {"context": given[1].clone()}, backend="aot_eager")
        assert torch.allclose(result, expected, atol=1e-5) and found is eager
        assert made(net) == 1


@pytest.mark.parametrize("how", ["make_fx", "symbolic_trace"])
def test_other_threads_go_on_while_ours_is_traced(behind, made, engine, how):
    """PyTorch refuses to run compiled code while the process traces with FX, whichever thread does (up to 2.13), and sends each
    module's call of the process to its tracer, which knows none of other threads' modules ("module is not installed as a
    submodule"); inductor traces so for each kernel (torch/_inductor/loop_body.py)."""
    tracing, go_on = threading.Event(), threading.Event()
    untouched = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    def backend(graph, inputs):
        from torch.fx.experimental.proxy_tensor import make_fx

        def stand(x):
            tracing.set()
            assert go_on.wait(60)
            return x

        if how == "make_fx":
            make_fx(lambda *args: graph(*map(stand, args)))(*inputs)
        else:
            torch.fx.symbolic_trace(stand)
        return graph

    torch._dynamo.register_backend(backend, name=f"slow_{how}")
    settings = engine("settings").CompileSettings(backend="eager")
    object.__setattr__(settings, "backend", f"slow_{how}")
    others = torch.compile(lambda x: x * 2 + 1, backend="eager")
    others(torch.ones(3))
    net, x = Net(), torch.randn(2, 4, 8)
    call = engine("background.model_call").ModelCall
    with engine("compile.events").watching:
        with engine("compile.binding").compiled_blocks(net, settings, call(False)):
            expected = net(x)
        assert tracing.wait(60)
        try:
            assert (torch.nn.Module.__call__, torch.nn.Module.__getattr__) == untouched
            assert torch.equal(others(torch.ones(3)), torch.full((3,), 3.0))
            with engine("compile.binding").compiled_blocks(net, settings, call(False)):
                assert torch.equal(net(x), expected)
        finally:
            go_on.set()
    made(net)


class Given(Block):
    def forward(self, x, function):
        return super().forward(function(x))


class Closing(Net):
    """Hands its blocks a function that closes over what the model's forward goes on to change."""

    def __init__(self):
        super().__init__(Given)
        self.seen = []

    def forward(self, x):
        shift = torch.ones(x.shape[-1])
        self.seen[:] = [weakref.ref(shift)]
        for block in self.blocks:
            x = block(x, lambda y: y + shift)
        shift = None
        return x


def test_functions_among_the_arguments_are_kept_as_they_were_and_without_data(behind, made, engine):
    net, x, given = Closing(), torch.randn(2, 4, 8), []
    expected = net(x)
    compiler = engine("background.thread").compiler

    @torch._dynamo.disable
    def asked(group, stand_in, done):
        gc.collect()
        given.append(net.seen[0]())
        return type(compiler).ask(compiler, group, stand_in, done)

    compiler.ask = asked
    try:
        result, eager = behind(net, x)
    finally:
        del compiler.ask
    assert eager and torch.equal(result, expected)
    assert given == [None], "the tensor has been freed with the call"
    assert made(net) == 1 and not any(group.failure for group in engine("compile.registry").code_of(net).groups.values())
    result, eager = behind(net, x)
    assert not eager and torch.equal(result, expected) and made(net) == 1


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


class Counting(Block):
    """Keeps a sum in a tensor that is no buffer."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = torch.zeros(())

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class CountingInAList(Block):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = [torch.zeros(())]

    def forward(self, x):
        self.seen[0] += 1
        return super().forward(x)


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


def test_a_switch_that_flips_while_code_is_traced_postpones_it(behind, made, engine, monkeypatch):
    """Another model's call, or another node's, has TF32 on for a while."""
    session, starts = engine("compile.session").CompileSession, []
    own = session.start

    def start(self):
        own(self)
        starts.append(1)
        if len(starts) == 1:
            torch.backends.cuda.matmul.allow_tf32 = True

    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(engine("background.thread"), "PATIENCE", 1.0)
    net, x = Net(), torch.randn(2, 4, 8)
    try:
        behind(net, x)
        while not starts:
            time.sleep(0.01)
        time.sleep(0.3)
        torch.backends.cuda.matmul.allow_tf32 = False
        made(net)
        assert len(starts) == 2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    (group,) = engine("compile.registry").code_of(net).groups.values()
    assert group.failure is None and not behind(net, x)[1]


def test_with_tf32_it_is_waited_for_code(engine):
    settings = engine("settings").CompileSettings
    assert settings(allow_tf32=True).waits and not settings().waits


@pytest.fixture
def held(monkeypatch):
    """Tracing on the thread stands still: it has begun, and goes on when it may."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    begun, go_on, own = threading.Event(), threading.Event(), InstructionTranslator.run

    def run(self):
        begun.set()
        assert go_on.wait(60)
        return own(self)

    monkeypatch.setattr(InstructionTranslator, "run", run)
    yield begun, go_on
    go_on.set()


def test_what_a_loader_switches_meanwhile_stays(behind, made, held):
    """PyTorch puts back what was there when it began to trace: transformers loads models in another default type."""
    begun, go_on = held
    net, x = Net(), torch.randn(2, 4, 8)
    try:
        torch.set_default_dtype(torch.float16)
        behind(net, x)
        assert begun.wait(60)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        go_on.set()
        made(net)
        assert torch.get_default_dtype() is torch.float32 and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_code_for_calls_under_autocast(behind, made):
    net, x = Net(), torch.randn(2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = behind(net, x)
        assert made(net) == 1
        result, eager = behind(net, x)
    assert not eager and torch.allclose(result, expected, atol=1e-2)
