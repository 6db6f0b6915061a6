"""Blocks that cannot be compiled, now or at all, seen from outside: the image is eager's, and what may pass is tried again."""

import copy
import threading
import weakref

import pytest
import torch
from support import Block, CompiledNet, Held, Net, Plain, without_compile_process

pytestmark = pytest.mark.usefixtures("inference_mode")
MODES = pytest.mark.parametrize("at_once", [False, True], ids=["in the background", "at once"])
FAULTS = pytest.mark.parametrize("fault", ["the limit is reached", "a piece cannot be traced"])


class Broken(Block):
    """Writes to its input before a graph break, as Flux's blocks do (`img += ...`)."""

    def forward(self, x, way="a"):
        x += 1
        torch._dynamo.graph_break()
        return super().forward(x) * {"a": 1, "b": 2, "c": 3}[way]


class BrokenNet(Net):
    def __init__(self):
        super().__init__(Broken, count=2)


class Compiler:
    """A backend that raises what is planned for its calls, and then compiles."""

    def __init__(self, *plan):
        self.plan, self.calls, self.threads = list(plan), 0, []

    def __call__(self, graph, _inputs):
        self.calls += 1
        self.threads.append(threading.current_thread())
        error = self.plan.pop(0) if self.plan else None
        if error is not None:
            raise error
        return graph.forward


@pytest.fixture
def excluded(engine, monkeypatch):
    """The blocks of which layers were excluded from the graphs, as of GGUF's: there are such layers once."""
    blocks = []

    def exclude(block):
        if not blocks:
            blocks.append(block)
            return True
        return False

    monkeypatch.setattr(engine("compile.compiled_code"), "on_compile_failure", [exclude])
    return blocks


@pytest.fixture(params=["the process", "the call"])
def lowered_in(engine, monkeypatch, request):
    if request.param == "the call":
        without_compile_process(engine, monkeypatch)


def wait_for(compiler, calls):
    for _ in range(600):
        if compiler.calls >= calls:
            break
        threading.Event().wait(0.1)


class BrokenScaled(Block):
    def forward(self, x, scale, way):
        x += 1
        torch._dynamo.graph_break()
        return super().forward(x) * scale * {"a": 1, "b": 2, "c": 3}[way]


class ScaledNet(Net):
    """Gives blocks an input whose elements share memory, which cannot be written to as it is, and changes with `x`."""

    def __init__(self):
        super().__init__(BrokenScaled, count=2)

    def forward(self, x, way):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x, x[:1, :1].expand(2, 4, 8), way)
        return x


@MODES
@FAULTS
@pytest.mark.parametrize("kind", [BrokenNet, ScaledNet])
def test_a_block_in_pieces_is_run_again_on_what_it_was_given(engine, monkeypatch, at_once, fault, kind):
    """The first piece is compiled, and has run, when a piece behind it is not."""
    net, x = kind(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, cache_limit=1 if fault == "the limit is reached" else 64)
    assert torch.allclose(step.call(at_once, x.clone(), way="a"), net(x.clone(), way="a"))
    if fault == "a piece cannot be traced":
        monkeypatch.setattr(engine("compile.traced_graph"), "prepare", lambda *_: 1 / 0)
    for way in "bcb":
        assert torch.allclose(step.call(at_once, x.clone(), way=way), net(x.clone(), way=way)), way


class ByWay(Block):
    def forward(self, x, way):
        return super().forward(x) * {"a": 1, "b": 2}[way]


class ByWayNet(Net):
    def forward(self, x, way):
        for block in reversed(self.blocks):
            x = block(x.to(block.inner.weight.dtype), way)
        return x


@MODES
@pytest.mark.parametrize("dynamic", ["auto", "false"])
def test_beyond_the_limit_blocks_ask_once_a_run_and_what_has_code_runs_it(engine, monkeypatch, at_once, dynamic):
    """To refuse, PyTorch takes milliseconds, and logs lines of a warning. Of blocks that share a group some may have
    code and others not, as where a checkpoint keeps its first block in another precision."""
    asked, ran = [], []
    graph, code = engine("compile.traced_graph").TracedGraph, engine("compile.compiled_code").BlockCode
    reach, call_graph = code._reach_limit, graph.__call__
    monkeypatch.setattr(code, "_reach_limit", lambda of: asked.append(1) or reach(of))
    monkeypatch.setattr(graph, "__call__", lambda traced, *args: ran.append(1) or call_graph(traced, *args))
    net = ByWayNet(ByWay, count=3)
    net.blocks[0].double()
    step = CompiledNet(engine, net, dynamic=dynamic, cache_limit=1)
    beyond = (4, "b") if dynamic == "auto" else (5, "a")

    def run(tokens, way):
        x = torch.randn(2, tokens, 8)
        ran.clear()
        result = step.call(at_once, x, way)
        assert torch.allclose(result, net(x, way))
        return len(ran), len(asked)

    run(4, "a"), run(4, "a")
    for _ in range(2):
        step.new_run()
        assert run(4, "a")[0] == 2 and run(*beyond)[0] == 0
        asked_once = len(asked)
        for _ in range(3):
            assert run(4, "a") == (2, asked_once) and run(*beyond) == (0, asked_once)
    assert len(asked) == 3 and step.graphs == 1 and not step.failures


def test_copies_of_the_inputs_cost_no_image_where_memory_is_short(engine, monkeypatch):
    """A card with room for what a block computes, but not beside the copies that a trace keeps of its arguments."""
    copies, changed = weakref.WeakSet(), engine("compile.call_shapes").Changed
    graph, keep = engine("compile.traced_graph").TracedGraph, changed.keep
    run = graph._run_unlowered

    def run_in_the_rest(traced, args):
        if copies:
            args[0].zero_()  # what it has written
            raise torch.OutOfMemoryError("no room")
        return run(traced, args)

    monkeypatch.setattr(changed, "keep", lambda kept: copies.add(kept) or keep(kept))
    monkeypatch.setattr(graph, "_run_unlowered", run_in_the_rest)
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend="eager")
    result, uncompiled = step(x.clone())
    assert torch.allclose(result, net(x)) and uncompiled and not copies
    step.wait()
    assert not step.failures and step.graphs == 1 and not step.call(False, x).isnan().any() and not step(x)[1]


class Writes(Plain):
    def forward(self, x):
        x += 1
        return super().forward(x)


@MODES
@pytest.mark.parametrize("block", [Plain, Writes])
@pytest.mark.parametrize("at", ["its first size", "a later size"])
def test_code_that_fails_at_a_size_costs_one_image_at_most(engine, at, block, at_once):
    """A kernel that the card cannot run, seen when it is run: the block goes on without code, and says why. Only the image in
    which it may have written to its inputs is lost."""
    size = 4 if at == "its first size" else 6

    def fails_at(graph, _inputs):
        def code(*args):
            if found := [arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape[:2] == (2, size)]:
                found[0].add_(block is Writes)  # it has begun
                raise RuntimeError("no room for this kernel")
            return graph.forward(*args)

        return code

    net, lost = Net(block), []
    step = CompiledNet(engine, net, backend=fails_at)
    for tokens in (4, 4, 6, 6, 5):
        x = torch.randn(2, tokens, 8)
        try:
            result = step.call(at_once, x.clone())
        except RuntimeError:
            lost.append(tokens)
        else:
            assert torch.allclose(result, net(x.clone()))
    assert lost == ([6] if block is Writes and size == 6 else [])
    (failure,) = step.failures
    assert "no room for this kernel" in failure


@pytest.mark.parametrize("writes", [False, True], ids=["nothing is written", "an input is written to"])
@pytest.mark.parametrize("at", ["its first run", "a later run"])
def test_code_that_lacks_memory_costs_no_image(engine, at, writes):
    """Operator by operator there may be room. The host is told where an input may be written to, and there is no copy. The
    code stays."""
    lacks, runs, blocks = [], [], 3

    def lacking(graph, _inputs):
        def code(*args):
            runs.append(1)
            if lacks:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph.forward(*args)

        return code

    net, x = Net(Writes if writes else Plain, blocks), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=lacking)
    step.call(False, x.clone())
    if at == "a later run":
        step.call(False, x.clone())
    lacks.append(1)
    if writes and at == "a later run":
        with pytest.raises(torch.OutOfMemoryError):
            step.call(False, x.clone())
    for _ in range(2):
        step.new_run()
        before, compiles = len(runs), step.compiles
        result, uncompiled = step(x.clone())
        assert torch.allclose(result, net(x.clone())) and uncompiled
        assert len(runs) == before + 1, "the other blocks of the step do not try"
        assert step.compiles > compiles, "a CUDA graph of this step would hold its operators"
    before = len(runs)
    lacks.clear()
    assert torch.allclose(step.call(False, x.clone()), net(x.clone())) and len(runs) > before and not step.failures


def test_inputs_are_put_back_when_the_memory_of_the_failed_code_is_free(engine, monkeypatch):
    """To compare them with their copies takes memory, and the error holds what the code has allocated."""
    allocated, lacks = weakref.WeakSet(), []

    def lacking(graph, _inputs):
        def code(*args):
            work = torch.zeros(8)
            allocated.add(work)
            result = graph.forward(*args)
            if lacks:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

        return code

    equal, changed = torch.equal, engine("compile.call_shapes")
    net, x = Net(Writes), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=lacking)
    step.call(False, x.clone())
    lacks.append(True)
    expected, compared = net(x.clone()), []
    with monkeypatch.context() as patch:
        patch.setattr(changed.torch, "equal", lambda *tensors: compared.append(len(allocated)) or equal(*tensors))
        result = step.call(False, x.clone())
    assert torch.allclose(result, expected) and compared and not any(compared)


def full(_tensor):
    raise RuntimeError("CUDA error: out of memory")  # as CUDA itself says it


class PatchedFirst(Block):
    """Calls its patch before all else."""

    def forward(self, x, transformer_options={}):  # noqa: B006  as the host writes it
        for patch in transformer_options.get("patches", {}).get("attn1_output_patch", []):
            x = patch(x, transformer_options)
        return super().forward(x)


class PatchedFirstNet(Net):
    def __init__(self):
        super().__init__(PatchedFirst, count=2)


@pytest.mark.parametrize("has_run", [False, True], ids=["at once", "after a piece has run"])
def test_a_failure_without_copies_costs_the_image_only_where_a_graph_has_run(engine, monkeypatch, has_run):
    """There was no memory for copies of the inputs; but if nothing has run, nothing has been written to them."""

    monkeypatch.setattr(engine("compile.call_shapes"), "memory_of", full)
    net, x = (BrokenNet if has_run else Net)(), torch.randn(2, 4, 8)
    compiler = Compiler(*([None] if has_run else []), *[ValueError("no kernel for this")] * 9)
    step = CompiledNet(engine, net, backend=compiler)
    engine("compile.traced_graph").LOWERERS.pop(step.settings.backend)  # in the call
    if has_run:
        with pytest.raises(Exception, match="no kernel for this"):
            step.call(False, x.clone())
    else:
        assert torch.allclose(step.call(False, x.clone()), net(x.clone())) and step.failures


@pytest.mark.parametrize("fault", ["settings", "no room for copies"])
def test_inputs_that_a_failing_block_has_changed_are_not_given_to_it_again(engine, monkeypatch, fault):
    """The first piece, or a patch before all pieces, has written to the input: it is restored, or the error is told."""
    net, x, patches = BrokenNet(), torch.randn(2, 4, 8), {}
    if fault == "settings":
        monkeypatch.setattr(engine("compile.compiled_code"), "traced_state", lambda *_: 1 / 0)
        step = CompiledNet(engine, net, backend=Compiler(None, *[ValueError("no kernel for this")] * 9))
    else:
        net = PatchedFirstNet()
        patches = {"transformer_options": {"patches": {"attn1_output_patch": [lambda x, _options: x.add_(1)]}}}
        monkeypatch.setattr(engine("compile.call_shapes"), "memory_of", full)
        step = CompiledNet(engine, net, backend=Compiler(*[ValueError("no kernel for this")] * 9))
    engine("compile.traced_graph").LOWERERS.pop(step.settings.backend)  # in the call
    expected = net(x.clone(), **copy.deepcopy(patches))
    if fault == "settings":
        assert torch.allclose(step.call(False, x.clone()), expected)
    else:
        with pytest.raises(Exception, match="no kernel for this"):
            step.call(False, x.clone(), **patches)


@pytest.mark.parametrize("fault", ["before the settings", "after them"])
def test_an_error_of_ours_leaves_no_code_that_was_traced_under_other_settings(engine, monkeypatch, fault):
    """A trace under PyTorch's own guards would not see what the next run changes."""
    seen = []

    def compiler(graph, _inputs):
        seen.append(torch.fx.experimental._config.use_duck_shape)
        return graph.forward

    broken = {
        "before the settings": ("compile.compiled_code", "traced_state"),
        "after them": ("compile.call_shapes", "memory_of"),
    }
    module, name = broken[fault]
    monkeypatch.setattr(engine(module), name, lambda *_: 1 / 0)
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=compiler)
    engine("compile.traced_graph").LOWERERS.pop(step.settings.backend)  # in the call
    for _ in range(2):
        assert torch.allclose(step.call(False, x), net(x))
    assert seen == ([True] if fault == "before the settings" else [False])
    assert bool(step.failures) == (fault == "before the settings")


@MODES
def test_what_fails_with_a_patch_stays_compiled_without_it(engine, monkeypatch, at_once):
    net, x = Net(), torch.randn(2, 4, 8)
    step, patched = CompiledNet(engine, net), {"patches": {"attn1_output_patch": [lambda y, _options: y * 2]}}
    step.call(at_once, x)
    with monkeypatch.context() as broken:
        broken.setattr(engine("compile.traced_graph"), "prepare", lambda *_: 1 / 0)
        for _ in range(2):
            assert torch.allclose(step.call(at_once, x, transformer_options=patched), net(x, transformer_options=patched))
    (group,) = step._groups
    assert step.failures and group.failure_now is not None
    assert torch.allclose(step.call(at_once, x), net(x)) and group.failure_now is None and step.graphs == 1
    assert step.failures, "it is told though the last call had no patch"


def test_what_may_pass_is_tried_a_few_times_with_a_patch_too(engine, monkeypatch):
    net, x, tried = Net(), torch.randn(2, 4, 8), []
    step, patched = CompiledNet(engine, net), {"patches": {"attn1_output_patch": [lambda y, _options: y * 2]}}
    step.at_once(x)

    def refuse(*_):
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine("compile.traced_graph"), "prepare", refuse)
    for _ in range(8):
        step.new_run()
        step.at_once(x, transformer_options=patched)
    assert 1 < len(tried) <= 1 + engine("compile.compiled_code").RETRIES


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), torch.OutOfMemoryError("no memory")], ids=str)
def test_what_passes_excludes_no_layers(engine, monkeypatch, fault):
    compiled_code = engine("compile.compiled_code")
    monkeypatch.setattr(engine("background.thread"), "RETRY_SECONDS", 0.0)
    asked = []
    monkeypatch.setattr(compiled_code, "on_compile_failure", [lambda block: asked.append(block) or True])
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=Compiler(fault))
    for _ in range(2):
        assert torch.equal(step.call(False, x), net(x))
        step.new_run()
    assert not asked and not step(x)[1] and not step.failures


@MODES
def test_layers_that_are_excluded_in_the_middle_of_a_call_are_so_in_the_next(engine, excluded, at_once, lowered_in):
    """Until then blocks still have them in: these are not given up for what the first block failed of."""

    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=(compiler := Compiler(*[RuntimeError("no kernel for this layer")] * 9)))
    assert torch.equal(step.call(at_once, x), net(x))
    assert excluded and compiler.calls == 1, "the blocks behind the first run eager in this call"
    compiler.plan.clear()
    for _ in range(2):
        assert torch.equal(step.call(at_once, x), net(x))
    assert not step.failures and step.graphs == 2 and not step(x)[1]


@MODES
def test_layers_that_were_excluded_before_explain_nothing(engine, excluded, at_once, lowered_in):
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=(compiler := Compiler(*[RuntimeError("no kernel for this")] * 9)))
    for _ in range(4):
        assert torch.equal(step.call(at_once, x), net(x))
    assert len(step.failures) == 1 and compiler.calls == 2


def test_without_memory_for_long_it_is_tried_in_the_next_run(engine, monkeypatch):
    thread = engine("background.thread")
    monkeypatch.setattr(thread, "RETRY_SECONDS", 0.001)
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=Compiler(*[torch.OutOfMemoryError("no memory")] * thread.ATTEMPTS))
    assert torch.equal(step.call(False, x), net(x))
    (failure,) = step.failures
    assert "memory" in failure and "the next runs try again" in failure
    step.new_run()
    assert torch.equal(step.call(False, x), net(x))
    assert not step(x)[1] and not step.failures


def test_jobs_without_memory_wait_for_it_together(engine, monkeypatch):
    """The one has not the other for a reason to be tried at once."""
    thread = engine("background.thread")
    monkeypatch.setattr(thread, "RETRY_SECONDS", 60.0)
    compiler = Compiler(*[torch.OutOfMemoryError("no memory")] * 2)
    inputs = [torch.randn(2, 4, width) for width in (8, 16)]
    steps = [CompiledNet(engine, Net(width=x.shape[-1]), backend=compiler) for x in inputs]
    for step, x in zip(steps, inputs, strict=True):
        step(x)
    wait_for(compiler, 2)
    threading.Event().wait(0.3)
    assert compiler.calls == 2
    for step, x in zip(steps, inputs, strict=True):
        assert torch.equal(step.at_once(x), step.net(x)), "who waits for code does not wait for the pause"
    assert compiler.calls == 4


def test_what_a_compiler_has_allocated_is_free_when_the_block_runs_plain(engine, monkeypatch):
    """Kernels are tuned on tensors as large as the block's."""
    tuned, left = [], []

    def tune(_graph, _inputs):
        tensor = torch.zeros(8)
        tuned.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("no memory")

    def look():
        left.append([tensor for tensor in tuned if tensor() is not None])

    class Looks(Block):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                look()
            return super().forward(x)

    shapes = engine("compile.call_shapes")
    memory_of = shapes.memory_of
    monkeypatch.setattr(shapes, "memory_of", lambda tensor: look() or memory_of(tensor))  # inputs that are put back
    without_compile_process(engine, monkeypatch)
    net, x = Net(Looks), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=tune)
    assert torch.equal(step.at_once(x), net(x)) and step.failures
    assert tuned and not any(left)


def test_a_compiler_without_memory_for_a_later_graph_is_told_and_not_asked_again(engine, monkeypatch):
    """Not for what the block's first graph, which has run, lacks beside copies of its arguments."""
    without_compile_process(engine, monkeypatch)
    compiler = Compiler(None, *[RuntimeError("CUDA error: out of memory")] * 9)
    net, x = BrokenNet(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=compiler)
    for _ in range(3):
        assert torch.equal(step.at_once(x.clone()), net(x.clone()))
    assert len(step.failures) == 1 and compiler.calls == 2


def test_a_size_that_lacks_memory_leaves_the_others_their_code(engine, lowered_in):
    """As the second pass of a workflow that samples a small image and then a large one."""
    large, small = torch.randn(2, 16, 8), torch.randn(2, 4, 8)

    def compile(graph, inputs):
        if any(tensor.shape[:2] == large.shape[:2] for tensor in inputs):
            raise torch.OutOfMemoryError("no memory")
        return graph.forward

    net = Net()
    step = CompiledNet(engine, net, backend=compile, dynamic="false")
    for _ in range(2 + engine("compile.compiled_code").RETRIES):
        for x in (small, large):
            step.new_run()
            assert torch.equal(step.at_once(x), net(x)) and bool(step.failures) is (x is large)


def no_room(_thread):
    raise RuntimeError("can't start new thread")


def test_a_process_without_room_for_another_thread_samples_on(engine, monkeypatch):
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        result, eager = step(x)
    assert eager and torch.equal(result, net(x)) and not step.failures and not step.is_being_compiled
    assert not any(group.code.is_being_lowered for group in step._groups)
    step(x)
    step.wait()
    assert not step(x)[1]


def test_a_process_without_room_for_another_thread_gets_ready_without(engine, monkeypatch):
    """What is imported ahead, the compile process, a job."""
    client, loading = engine("compile_process.client"), engine("compile_process.obtain")
    process = client.CompileProcess()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        assert loading.import_ahead.__wrapped__().ident is None
        process.start()
        job = engine("background.thread").Job(weakref.ref(client), lambda: None, torch.device("cpu"))
        engine("background.thread").compiler.submit(job)
    assert process.refusal is None and process.pid is None, "a graph tries again"
    assert job.over and not engine("background.thread").compiler.busy


class InterruptProcessingException(Exception):
    """The host's cancel, as it is up to ComfyUI 0.25: no BaseException."""


def test_a_cancel_ends_the_run_and_is_no_failure(engine):
    def cancel():
        if backend.begun.is_set():
            raise InterruptProcessingException

    net, x, backend = Net(), torch.randn(2, 4, 8), Held()
    step = CompiledNet(engine, net, backend=backend)
    waits = engine("background.model_call").ModelCall(True, cancel)
    blocks = engine("compile.binding").Binding(net, step.settings, waits).bound()
    with pytest.raises(InterruptProcessingException), engine("compile.session").watching, blocks:
        net(x)
    backend.go_on.set()
    step.wait()
    assert not step.failures and torch.equal(step.at_once(x), net(x))


@MODES
@pytest.mark.parametrize("change", ["dtype", "reset"])
def test_the_same_sizes_for_another_reason_are_no_number_that_varies(engine, at_once, change):
    """Graphs with numbers that vary are lowered in the call."""
    compiler = Compiler()
    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=compiler)
    step.call(at_once, x, scale=2.0)
    if change == "reset":
        torch._dynamo.reset()
    else:
        net, x = net.double(), x.double()
    assert torch.equal(step.call(at_once, x, scale=2.0), net(x, scale=2.0))
    assert step.graphs == 2 and threading.main_thread() not in compiler.threads


def test_what_fails_of_discarded_code_gives_the_new_one_not_up(engine, excluded):
    held = threading.Event()

    class TwoFail(Compiler):
        """Neither of the first two graphs compiles, the second later."""

        def __call__(self, graph, inputs):
            self.calls += 1
            if self.calls == 2:
                assert held.wait(60)
            if self.calls <= 2:
                raise RuntimeError("no kernel for this layer")
            return graph.forward

    net, x = Net(), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend=(compiler := TwoFail()))
    with pytest.MonkeyPatch.context() as patch:  # both are queued before the first is begun
        submitted, thread = [], engine("background.thread").compiler
        patch.setattr(thread, "submit", submitted.append)
        step(x)
        step(x[:1])
    for job in submitted:
        thread.submit(job)
    wait_for(compiler, 2)
    assert excluded and torch.equal(step(x)[0], net(x)), "traced anew"
    held.set()
    step.wait()
    assert not step.failures and not step(x)[1]


@pytest.mark.parametrize("writes", [False, True])
def test_inputs_of_a_block_in_pieces_are_copied_where_it_writes_to_them(engine, monkeypatch, writes):
    class Pieces(Block):
        def forward(self, x, way="a"):
            if writes:
                x += 1
            torch._dynamo.graph_break()
            return super().forward(x)

    copied = []
    shapes = engine("compile.call_shapes")
    memory_of = shapes.memory_of
    net, x = Net(Pieces, count=2), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    step.at_once(x)
    monkeypatch.setattr(shapes, "memory_of", lambda tensor: copied.append(tensor) or memory_of(tensor))
    step.at_once(x)
    assert len(copied) == (2 if writes else 0)


def helper(y, transformer_options):
    return y


def by_place(y, transformer_options):
    """What another pack puts there: it needs a graph for each block."""
    return y * (1 + [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8][transformer_options["block_index"]])


class Helped(Block):
    def forward(self, x, transformer_options={}):  # noqa: B006  as the host writes it
        return helper(super().forward(x), transformer_options=transformer_options)


def test_what_failed_while_a_function_was_exchanged_is_compiled_when_it_is_back(engine, monkeypatch):
    net, x = Net(Helped, count=8), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend="eager")

    def run():
        step.new_run()
        for _ in range(2):
            assert torch.allclose(step.call(False, x, transformer_options={}), net(x, transformer_options={}))

    run()
    assert not step.failures
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "helper", by_place)
        for _ in range(2):
            run()
            assert any("for the same shapes" in failure for failure in step.failures)
    run()
    assert not step.failures and not step(x, transformer_options={})[1]


def by_name(y, transformer_options):
    """It needs a graph for each call."""
    return y * len(transformer_options["name"])


def test_what_is_exchanged_for_the_length_of_each_call_is_not_tried_in_each_run(engine, monkeypatch):
    net, x = Net(Helped), torch.randn(2, 4, 8)
    step, graphs, calls = CompiledNet(engine, net, backend="eager", cache_limit=200), [], 0
    for _ in range(8):
        step.new_run()
        for _ in range(8):
            calls += 1
            options = {"name": "n" * calls}
            with monkeypatch.context() as patch:
                patch.setitem(globals(), "helper", by_name)
                assert torch.allclose(step.call(False, x, transformer_options={**options}), net(x, transformer_options=options))
        graphs.append(step.graphs)
    assert step.failures and len(set(graphs)) <= 1 + engine("compile.compiled_code").RETRIES, graphs
