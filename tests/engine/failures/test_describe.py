"""When compiling fails: the right result, said once; or a clear stop."""

import logging
import subprocess

import pytest
import torch
from support import Block, Net

pytestmark = pytest.mark.usefixtures("inference_mode")


class InPlaceThenTrouble(Block):
    """Changes its input, then needs a second graph, which the failing backend refuses."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        x += self.inner(x)
        torch._dynamo.graph_break()
        return x + self.outer(x)


@pytest.fixture
def backend():
    """A registered backend that fails: how often it was called, and the error that it raises."""
    behaviour = {"calls": 0, "error": RuntimeError("no kernel for this")}

    def failing(_graph, _inputs):
        behaviour["calls"] += 1
        raise behaviour["error"]

    torch._dynamo.register_backend(failing, name="aot_eager_failing")
    yield behaviour
    torch._dynamo.backends.registry._COMPILER_FNS.pop("aot_eager_failing")


@pytest.fixture
def run(engine, backend, monkeypatch):
    settings = engine("settings")
    monkeypatch.setattr(settings, "_CHOICES", {**settings._CHOICES, "backend": ("aot_eager_failing", "eager")})

    def call(net, x, backend="aot_eager_failing", **chosen):
        with engine("compile.session").watching:
            chosen = settings.CompileSettings(backend=backend, **chosen)
            with engine("compile.binding").Binding(net, chosen).bound():
                return net(x)

    return call


def failures(engine, net):
    return [group.failure for group in engine("compile.registry").code_of(net).groups.values() if group.failure]


def test_stop_raises_with_the_cause_each_time_and_tries_once(engine, run, backend):
    net = Net()
    for _ in range(2):
        with pytest.raises(engine("errors").BlockCompileError, match=r"Block could not be compiled.*no kernel for this"):
            run(net, torch.randn(2, 4, 8), on_failure="stop")
    assert backend["calls"] == 1 and len(failures(engine, net)) == 1


@pytest.mark.parametrize("on_failure", ["run uncompiled", "stop"])
def test_what_may_pass_is_tried_again_in_the_next_runs_and_not_for_ever(engine, run, backend, on_failure):
    backend["error"] = OSError("No space left on device")
    net, x = Net(), torch.randn(2, 4, 8)

    def attempt():
        before = backend["calls"]
        try:
            run(net, x, on_failure=on_failure)
        except engine("errors").BlockCompileError:
            assert on_failure == "stop"
        return backend["calls"] - before

    assert [attempt(), attempt()] == [1, 0]
    code, tries = engine("compile.registry").code_of(net), []
    for _ in range(5):
        code.new_run()
        tries += [attempt(), attempt()]
    assert tries == [1, 0] * engine("compile.compiled_code").RETRIES + [0, 0] * (5 - engine("compile.compiled_code").RETRIES)


@pytest.mark.parametrize(
    "said, may_pass",
    [
        ("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", True),
        ("/tmp/ccXYZ.s: fatal error: error writing to /tmp/ccXYZ.s: No space left on device", True),
        ("main.cpp:3:10: fatal error: omp.h: No such file or directory", False),
    ],
)
def test_a_compiler_that_was_stopped_may_work_the_next_time(engine, said, may_pass):
    from torch._inductor.exc import CppCompileError

    failure = engine("failures.describe").describe_failure("Block", CppCompileError(["g++", "main.cpp"], said))
    assert failure.may_pass is may_pass


@pytest.mark.parametrize(
    "known",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        *map(RuntimeError, ("CUDA error: out of memory", "CUDA driver error: out of memory", "HIP error: out of memory")),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_compiler_without_memory_costs_no_image(engine, run, backend, known):
    """The host counts no error of a compiler's as out of memory, and the image needs none of the compiler's."""
    backend["error"] = known
    net, x = Net(), torch.randn(2, 4, 8)
    assert torch.equal(run(net, x), Net.forward(net, x))
    (failure,) = failures(engine, net)
    assert failure.may_pass and "the next runs try again" in failure.message()
    with pytest.raises(engine("errors").BlockCompileError, match="too little memory"):
        run(Net(), x, on_failure="stop")


def test_an_interrupt_is_never_swallowed(engine, run, backend):
    class Interrupted(BaseException):
        """As the host's InterruptProcessingException is."""

    backend["error"] = Interrupted()
    net = Net()
    with pytest.raises(Interrupted):
        run(net, torch.randn(2, 4, 8))
    assert not failures(engine, net)


def test_an_error_of_the_model_itself_is_shown_as_it_is(engine, run):
    net = Net()
    net.entry = torch.nn.Identity()
    with pytest.raises(RuntimeError) as error:
        net(torch.randn(2, 4, 9))
    plain = str(error.value)
    with pytest.raises(RuntimeError) as error:
        run(net, torch.randn(2, 4, 9), backend="eager")
    assert str(error.value) == plain
    assert not failures(engine, net)


def test_fullgraph_names_the_untraceable_block(engine, run):
    net, x = Net(InPlaceThenTrouble), torch.randn(2, 4, 8)
    expected = Net.forward(net, x.clone())
    assert torch.equal(run(net, x.clone(), backend="eager", fullgraph=True), expected)
    (failure,) = failures(engine, net)
    assert "set fullgraph to false" in failure.cure


def test_a_compiler_that_fails_inside_pytorch_has_a_cure(engine, run, backend):
    tcc = "D:\\python_embeded\\Lib\\site-packages\\triton\\runtime\\tcc\\tcc.exe"
    backend["error"] = subprocess.CalledProcessError(1, [tcc, "cuda_utils.c", *(f"-I{n}" * 20 for n in range(20))])
    net, x = Net(), torch.randn(2, 4, 8)
    assert torch.equal(run(net, x), Net.forward(net, x))
    (failure,) = failures(engine, net)
    assert "tcc.exe" in failure.reason and "non-zero exit status 1" in failure.reason and len(failure.message()) < 1000
    assert "include" in failure.cure and "only_blocks" not in failure.cure


def test_the_limit_of_variants_is_loud_and_correct(engine, run, caplog):
    net = Net()
    with caplog.at_level(logging.WARNING, "torch-compile-kit"):
        for tokens in range(2, 9):
            x = torch.randn(2, tokens, 8)
            expected = net(x)
            assert torch.equal(run(net, x, backend="eager", dynamic="false", cache_limit=3), expected)
    (group,) = engine("compile.registry").code_of(net).groups.values()
    assert group.stats.graphs == 3 and group.code.limit_reached and [reason.name for reason in group.eager] == ["LIMIT"]
    (message,) = (r.getMessage() for r in caplog.records if "cache_limit" in r.getMessage())
    assert "Block: compiled 3 times" in message and "size mismatch at index 1" in message
    group.code.discard()  # new code has a limit of its own
    run(net, x, backend="eager", dynamic="false", cache_limit=3)
    assert group.stats.graphs == 4 and not group.code.limit_reached


def test_only_what_a_failed_call_has_changed_is_put_back(engine):
    with torch.inference_mode(False):
        changing, still, shared = torch.randn(2, 4), torch.randn(2, 4), torch.randn(1, 4).expand(3, 4)
        found = [t.clone() for t in (changing, still, shared)]
        changed = engine("compile.call_shapes").Changed(((changing, still), {"scale": shared}))
        changed.keep()
        changing.add_(1)
        shared[0].mul_(2)
        versions = still._version
        assert changed.put_back()
        assert all(torch.equal(a, b) for a, b in zip((changing, still, shared), found, strict=True))
        assert still._version == versions


def test_who_is_told_of_compilations_may_fail(engine, run, monkeypatch):
    """The page's progress text goes through the host, inside PyTorch's callback."""

    def fails(_block):
        raise RuntimeError("no page")

    monkeypatch.setattr(engine("compile.session").monitor, "listener", fails)
    net, x = Net(), torch.randn(2, 4, 8)
    assert torch.equal(run(net, x, backend="eager"), Net.forward(net, x))
    torch._dynamo.reset()  # asserts that no compilation is going on


def test_a_failure_that_may_pass_is_no_matter_for_other_settings(engine, run, backend):
    backend["error"] = OSError("No space left on device")
    net, x = Net(), torch.randn(2, 4, 8)
    expected = Net.forward(net, x)
    assert torch.equal(run(net, x), expected) and failures(engine, net)
    assert torch.equal(run(net, x, backend="eager"), expected)
    assert len(failures(engine, net)) == 1 and len(engine("compile.registry").code_of(net).groups) == 2


def test_watching_ends_after_somebody_has_reset_dynamo(engine):
    from torch._dynamo.callback import callback_handler

    monitor = engine("compile.session")
    with monitor.watching:
        torch._dynamo.reset()
    with monitor.watching:
        torch._dynamo.reset()
        monitor.watching.renew()
        assert monitor._on_compile_start in callback_handler.start_callbacks
    assert not callback_handler.start_callbacks and not callback_handler.end_callbacks


class Elsewhere(Net):
    """Goes through its blocks by another of their methods, except where it is told to call them."""

    def forward(self, x, call=False):
        for block in self.blocks:
            x = block(x) if call else block.outer(block.inner(x))
        return x


@pytest.mark.parametrize("calls", ["never", "first", "later"])
def test_a_model_that_calls_no_block_is_told_of_once(engine, caplog, calls):
    net, x, settings = Elsewhere(), torch.randn(2, 4, 8), engine("settings").CompileSettings(backend="eager")
    code = engine("compile.registry").code_of(net)
    for call in {"never": [False] * 3, "first": [True, False], "later": [False, False, True]}[calls]:
        expected = net(x, call)
        with engine("compile.binding").Binding(net, settings).bound():
            assert torch.equal(net(x, call), expected)
    warned = [record.getMessage() for record in caplog.records if "as modules" in record.getMessage()]
    said = "The model does not call its blocks (3 Block) as modules but by other methods: they run uncompiled."
    assert warned == ([] if calls == "first" else [said])
    assert code.uncalled == ({"Block": 3} if calls == "never" else {})
    assert engine("messages.report")._model_json(net, [])["blocks_not_called"] == code.uncalled
