"""Settings of PyTorch for a while: two threads that overlap leave none behind, whether or not each has its own."""

import functools
import os
import threading

import pytest
import torch
import torch.utils._triton
from support import CompiledNet, Net, torch_settings, without_compile_process

SCOPES = {
    "sampling": lambda found: (found.sampling_scope, found.sampling_switches(True, True)),
    "compiling": lambda found: (found.compile_scope, {"recompile_limit": 77, "specialize_float": False}),
}


def changed(before):
    return {name: (before[name], value) for name, value in torch_settings().items() if value != before[name]}


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_threads_that_overlap(name, first_out, engine):
    before, entering, leaving, after = torch_settings(), [], [], []
    enter, leave = ([threading.Event(), threading.Event()] for _ in range(2))
    entered, left = ([threading.Event(), threading.Event()] for _ in range(2))
    looked = threading.Barrier(3)  # before anybody is inside

    def work(index):
        scope, values = SCOPES[name](engine("torch_settings"))
        own = torch_settings()
        looked.wait(30)
        assert enter[index].wait(30)
        with scope.applied(**values):
            entering.append(torch_settings() != own)
            entered[index].set()
            assert leave[index].wait(30)
            leaving.append(torch_settings() != own)
        if index != first_out:
            after.append(torch_settings() == own)
        left[index].set()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    looked.wait(30)
    for index in (0, 1):
        enter[index].set()
        assert entered[index].wait(30)
    for index in (first_out, 1 - first_out):
        leave[index].set()
        assert left[index].wait(30)
    for thread in threads:
        thread.join(30)
    assert changed(before) == {}
    assert (entering, leaving, after) == ([True] * 2, [True] * 2, [True]), "in force until the last thread leaves"


SET = {
    "sampling": {"tf32": True, "cudnn": (True, True)},
    "compiling": {"torch._dynamo.config.recompile_limit": "77", "torch._dynamo.config.specialize_float": "False"},
}


@pytest.mark.parametrize("name", SCOPES)
def test_an_error_inside_leaves_nothing(name, engine):
    before = torch_settings()
    scope, values = SCOPES[name](engine("torch_settings"))
    with pytest.raises(KeyError), scope.applied(**values):
        now = torch_settings()
        assert changed(before) and {setting: now[setting] for setting in SET[name]} == SET[name]
        raise KeyError("inside")
    assert changed(before) == {}


def test_a_switch_that_cannot_be_written_leaves_the_others_as_they_were(engine):
    values, refusing = {"first": 1, "second": 2}, []

    def write(name, value):
        if value == 30:
            refusing.append(name)
            raise ValueError(name)
        values[name] = value

    switches = {name: (functools.partial(values.get, name), functools.partial(write, name)) for name in values}
    scope = engine("torch_settings").SharedScope(switches)
    with pytest.raises(ValueError, match="second"), scope.applied(first=10, second=30):
        raise AssertionError("not entered")
    assert values == {"first": 1, "second": 2} and refusing == ["second"]
    with scope.applied(first=5):
        assert values["first"] == 5
    assert values["first"] == 1


def ask(question):
    try:
        return question()
    except RuntimeError:  # PyTorch's older setting and its newer one do not agree
        return "raises"


def precisions():
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    owners = torch.backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn, mkldnn.matmul
    older = lambda: cuda.matmul.allow_tf32, lambda: cudnn.allow_tf32, torch.get_float32_matmul_precision
    return [owner.fp32_precision for owner in owners] + [ask(question) for question in older]


def reset_precisions():
    """As PyTorch begins."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for owner in (torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn.matmul):
        owner.fp32_precision = "none"


@pytest.fixture
def untouched():
    reset_precisions()
    yield precisions()
    reset_precisions()


def newer(*owner, value):
    return lambda: setattr(functools.reduce(getattr, owner, torch.backends), "fp32_precision", value)


CHOICES = {
    "nothing": lambda: None,
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "older setting, off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "older setting, on": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "all ieee": newer(value="ieee"),
    "all tf32": newer(value="tf32"),
    "cudnn ieee": newer("cudnn", value="ieee"),
    "cudnn tf32": newer("cudnn", value="tf32"),
    "convolutions ieee": newer("cudnn", "conv", value="ieee"),
    "rnn ieee": newer("cudnn", "rnn", value="ieee"),
    "products ieee": newer("cuda", "matmul", value="ieee"),
    "products tf32": newer("cuda", "matmul", value="tf32"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_in_tf32_leaves_each_precision_as_somebody_has_chosen_it(untouched, engine, choice):
    """By PyTorch's older settings or its newer ones; an older one that can be read before can be read during the run too."""
    CHOICES[choice]()
    settings, before = engine("torch_settings"), precisions()
    with settings.sampling_scope.applied(**settings.sampling_switches(True, False)):
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        assert {cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} == {"tf32"}
        during = precisions()
        assert [after for was, after in zip(before, during, strict=True) if was != "raises"].count("raises") == 0
        assert (before[-1], during[-1]) in {(was, was) for was in ("high", "medium", "raises")} | {("highest", "high")}
    assert precisions() == before
    if choice == "all ieee":
        torch.backends.fp32_precision = "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32", "it goes on following that of all"


@pytest.mark.parametrize("operation", ["matmul", "conv", "rnn"])
def test_the_precision_of_each_operation_is_part_of_what_results_depend_on(untouched, engine, operation):
    owner = torch.backends.cuda if operation == "matmul" else torch.backends.cudnn
    seen = {engine("torch_settings").numerics()}
    for value in ("ieee", "tf32"):
        getattr(owner, operation).fp32_precision = value
        seen.add(engine("torch_settings").numerics())
    assert len(seen) == (3 if operation == "matmul" else 2)


has_libdevice_key = pytest.mark.skipif(
    not hasattr(torch.utils._triton, "_extern_libs_key"), reason="PyTorch before 2.12 knows nothing of libdevice"
)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA toolkit whose libdevice is another than Triton's, and nobody's choice yet."""
    pytest.importorskip("triton")
    import torch.utils.cpp_extension
    import triton.knobs

    file = tmp_path / "nvvm" / "libdevice" / "libdevice.10.bc"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"another")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)
    monkeypatch.delitem(vars(triton.knobs.nvidia), "libdevice_path", raising=False)
    return str(file)


def chosen():
    import triton.knobs

    return os.environ.get("TRITON_LIBDEVICE_PATH"), vars(triton.knobs.nvidia).get("libdevice_path")


@has_libdevice_key
def test_the_key_of_a_graph_is_the_same_before_and_after_its_kernels(toolkit, engine):
    """PyTorch chooses the library for kernels when it compiles the first: a graph was not found again after a restart."""
    from torch._inductor.runtime.compile_tasks import _set_triton_libdevice_path_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    def key():
        return torch.utils._triton._extern_libs_key(make_backend(GPUTarget("cuda", 90, 32)))

    settings, own = engine("torch_settings"), key()
    with settings.libdevice_scope.applied(**settings.libdevice()):
        assert key() == own
        _set_triton_libdevice_path_impl()
        with settings.libdevice_scope.applied(**settings.libdevice()):  # another thread's
            assert key() == own
        assert key() == own
    assert chosen() == (None, None) and key() == own
    _set_triton_libdevice_path_impl()  # what others compile gets what PyTorch chooses
    assert chosen() == (toolkit, toolkit) and key() != own
    assert settings.libdevice() == {}, "a choice is respected"


@pytest.mark.usefixtures("inference_mode")  # else, before PyTorch 2.15, a view has guards on what it is a view of
@has_libdevice_key
def test_blocks_are_compiled_with_tritons_own_library(toolkit, engine, monkeypatch):
    from torch._inductor import compile_fx

    seen = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_args, **_options: seen.append(chosen()) or graph)
    without_compile_process(engine, monkeypatch)
    CompiledNet(engine, Net(), backend="inductor").at_once(torch.randn(2, 4, 8))
    assert len(seen) == 1 and seen[0][0] == seen[0][1] and "triton" in seen[0][0] and chosen() == (None, None)


@pytest.fixture
def exchanged(engine):
    """A scope with one function, where that function stands, a wrapper of it, and what was wrapped."""
    functions, taken, settings = {"function": lambda: ["plain"]}, [], engine("torch_settings")

    def wrapper(function):
        taken.append(function)
        return lambda: ["ours", *function()]

    return settings.SharedScope({"function": settings.entry(lambda: functions, "function")}), functions, wrapper, taken


def test_users_that_take_turns_share_one_wrapper(exchanged):
    """Without a moment in which nobody is inside: each would wrap the wrapper of the one before."""
    scope, functions, wrapper, taken = exchanged
    plain = functions["function"]
    before = scope.wrapping(function=wrapper)
    before.__enter__()
    for _ in range(5):
        turn = scope.wrapping(function=wrapper)
        turn.__enter__()
        before.__exit__(None, None, None)
        assert functions["function"]() == ["ours", "plain"]
        before = turn
    before.__exit__(None, None, None)
    assert functions["function"] is plain and taken == [plain]


def test_a_function_that_another_pack_puts_in_the_place_of_ours_stays(exchanged):
    scope, functions, wrapper, taken = exchanged
    plain = functions["function"]
    with scope.wrapping(function=wrapper):
        ours = functions["function"]
        functions["function"] = theirs = lambda: ["theirs", *ours()]
        with scope.wrapping(function=wrapper), scope.applied(function=plain):  # an overlapping user
            assert functions["function"] is theirs
    assert functions["function"] is theirs and taken == [plain]
    with scope.wrapping(function=wrapper):
        assert functions["function"]() == ["ours", "theirs", "ours", "plain"]
    assert functions["function"] is theirs and taken == [plain, theirs]
    functions["function"] = ours  # what they found
    with scope.wrapping(function=wrapper):
        assert functions["function"]() == ["ours", "plain"]
    assert functions["function"] is plain


def test_what_is_suspended_is_this_threads_own_and_what_changes_meanwhile_stays(engine):
    """Another pack's code is called under its own settings, which it may change; a thread that traces keeps its."""
    scope, config, seen = engine("torch_settings").compile_scope, torch._dynamo.config, []

    def look():
        with scope.suspended():
            seen.append(config.suppress_errors)

    with config.patch(suppress_errors=True):
        with scope.applied(suppress_errors=False):
            with scope.suspended():
                assert config.suppress_errors
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert not config.suppress_errors
            with pytest.raises(ZeroDivisionError), scope.suspended():
                config.suppress_errors = False
                raise ZeroDivisionError
        assert not config.suppress_errors and len(seen) == 1
        is_of_thread = engine("torch_settings")._config_is_of_thread()
        assert is_of_thread or seen == [False], "of the process: the other thread's user has set it"


def test_who_sets_something_while_a_scope_is_suspended_leaves_nothing(engine):
    """Compiled code that another pack's patch runs, inside a block that was compiled under limits."""
    scope, config = engine("torch_settings").compile_scope, torch._dynamo.config
    with config.patch(suppress_errors=True):
        before = config.suppress_errors, config.recompile_limit
        with scope.applied(suppress_errors=False, recompile_limit=64):
            with scope.suspended():
                with scope.applied(suppress_errors=False, recompile_limit=77, fail_on_recompile_limit_hit=True):
                    assert config.recompile_limit == 77
                assert (config.suppress_errors, config.recompile_limit) == before and not config.fail_on_recompile_limit_hit
            assert (config.suppress_errors, config.recompile_limit) == (False, 64)
        assert (config.suppress_errors, config.recompile_limit) == before and not config.fail_on_recompile_limit_hit


def test_a_thread_that_enters_a_suspended_scope_keeps_its_values(engine):
    torch_settings = engine("torch_settings")
    table = {"name": "usual"}
    scope = torch_settings.SharedScope({"name": torch_settings.entry(lambda: table, "name")})
    entered, leave = threading.Event(), threading.Event()

    def other():
        with scope.applied(name="the other's"):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with scope.applied(name="ours"):
        with scope.suspended():
            assert table["name"] == "usual"
            thread.start()
            assert entered.wait(60)
            with scope.suspended():
                assert table["name"] == "the other's", "it is in use"
        assert table["name"] == "ours"
        leave.set()
        thread.join()
        assert table["name"] == "ours"
    assert table["name"] == "usual"
