"""What a model asks its attention for, and which of that is measured."""

import threading
from contextlib import nullcontext

import pytest
import torch


def attention_pytorch(q, *_args, **_kwargs):
    return q


def attention_sage(q, *_args, **_kwargs):
    return q


def tensors(tokens, keys=None, width=64, dtype=torch.float16):
    return [torch.randn(2, n, width).to(dtype) for n in (tokens, keys or tokens, keys or tokens)]


@pytest.fixture
def survey(engine):
    return engine("attention_kernels").AttentionSurvey("auto")


def test_it_counts_calls_by_layout_and_keeps_no_tensor(engine, survey):
    for tokens in (4096, 4096, 77):
        survey(attention_pytorch, *tensors(tokens), 4)
    survey(attention_pytorch, *tensors(4096), 4, mask=torch.zeros(4096, 4096))
    assert sorted(survey.calls.values()) == [1, 1, 2]
    layouts = [part for call in survey.calls for part in call if part is not None]
    assert all(isinstance(layout, engine("tensor_spec").TensorSpec) for layout in layouts)


def test_the_users_own_kernel_is_not_counted(survey):
    survey(attention_sage, *tensors(16), 4)
    survey(attention_pytorch, *tensors(16), 4, enable_gqa=True)
    assert not survey.calls and survey.best() == "comfyui"


def test_a_call_without_attention_chooses_nothing_for_good(survey):
    assert survey.best() == "comfyui" and not survey.complete


def test_only_the_calls_that_make_up_most_of_the_work_are_measured(engine, survey):
    for tokens, keys, count in ((4096, 4096, 5), (1024, 1024, 5), (4096, 77, 5), (64, 64, 1)):  # SD 1.5
        for _ in range(count):
            survey(attention_pytorch, *tensors(tokens, keys), 4)
    chosen = engine("attention_kernels")._costliest(survey.calls)
    assert [(call[0].shape[2], call[1].shape[2], count) for call, count in chosen.items()] == [(4096, 4096, 5)]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"flash": 1.0, "cudnn": 0.5, "efficient": 2.0}, "cudnn"),
        ({"flash": 1.0, "cudnn": 0.97, "efficient": 2.0}, "comfyui"),
        ({"flash": float("inf"), "cudnn": float("inf"), "efficient": 2.0}, "efficient"),
        ({"flash": float("inf"), "cudnn": float("inf"), "efficient": float("inf")}, "comfyui"),
    ],
)
def test_the_fastest_is_chosen_if_it_is_worth_it(engine, survey, monkeypatch, seconds, best):
    attention = engine("attention_kernels")
    monkeypatch.setattr(attention, "_measure", lambda kernel, _call: seconds[kernel])
    survey(attention_pytorch, *tensors(32, width=4 * 64), 4)
    assert survey.best() == best


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
def test_no_kernel_is_off_while_another_is_tried(engine, monkeypatch, kernel):
    """That holds for the process: a graph with attention could not be lowered meanwhile, nor a text encoder run."""
    attention, on = engine("attention_kernels"), []
    names = ("flash_sdp", "cudnn_sdp", "mem_efficient_sdp", "math_sdp")

    def can_run(*_):
        on.extend(getattr(torch.backends.cuda, f"{name}_enabled")() for name in names)

    monkeypatch.setattr(attention, "_can_run", can_run)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    q = torch.randn(1, 4, 16, 64)
    spec = engine("tensor_spec").TensorSpec.of(q)
    assert attention._measure(kernel, (spec, spec, spec, None, None)) == float("inf")
    with pytest.raises(engine("errors").InvalidSetting, match="cannot run it for 1x4x16x64"):
        attention.AttentionSurvey(kernel)._check(q, q, q, None)
    assert on == [True] * 8


def test_a_kernel_that_would_be_compiled_for_each_shape_is_not_even_tried(engine, survey, monkeypatch):
    """cuDNN's at 40, 80 and 160 channels a head: trying it takes longer than it will ever save."""
    attention, tried = engine("attention_kernels"), []
    seconds = {"flash": 1.0, "cudnn": 0.5, "efficient": 2.0}
    monkeypatch.setattr(attention, "_measure", lambda kernel, _call: tried.append(kernel) or seconds[kernel])
    for tokens, width in ((4096, 40), (4096, 40), (2048, 80), (16, 160)):
        survey(attention_pytorch, *tensors(tokens, width=4 * width), 4)
    assert survey.best() == "comfyui" and set(tried) == {"flash", "efficient"}


class Clock:
    """A GPU that wakes before all calls are launched in the attempts named, and whose calls then seem to take a second."""

    def __init__(self, late, seconds):
        self.late, self.seconds, self.sleeps = late, seconds, []

    def sleep(self, cycles):
        self.sleeps.append(cycles)

    def Event(self, **_):  # noqa: N802  torch.cuda's name
        return self

    def record(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return len(self.sleeps) in self.late

    def elapsed_time(self, _end):
        return 5000 * (1 if self.query() else self.seconds)


@pytest.mark.parametrize(
    ("late", "found", "sleeps"), [((), 2.0, [1, 1]), ((1, 3), 2.0, [1, 2, 2, 4]), (range(9), None, [1, 2, 4, 8, 16, 32, 64])]
)
def test_a_kernel_is_timed_only_if_all_calls_were_launched_in_time(engine, monkeypatch, late, found, sleeps):
    attention, clock = engine("attention_kernels"), Clock(late, 2.0)
    monkeypatch.setattr(torch, "cuda", clock)
    monkeypatch.setattr(engine("torch_compat.private"), "sleep_on_gpu", clock.sleep)
    assert attention._seconds_on_gpu(lambda: None) == found
    assert [cycles // attention._CYCLES for cycles in clock.sleeps] == sleeps


def test_what_could_not_be_timed_is_no_choice_for_ever(engine, survey, monkeypatch, caplog):
    attention = engine("attention_kernels")
    monkeypatch.setattr(attention, "_seconds_on_gpu", lambda _call: None)
    monkeypatch.setattr(attention, "_can_run", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    survey(attention_pytorch, *tensors(32, width=4 * 64), 4)
    with caplog.at_level("INFO", "torch-compile-kit"):
        assert (survey.best(), survey.complete) == ("comfyui", False)
    assert "too busy" in caplog.text


@pytest.mark.parametrize(("gqa", "another", "host"), [(False, False, 0), (True, False, 1), (False, True, 1)])
@pytest.mark.parametrize("reshaped", [False, True])
def test_what_the_kernel_is_not_for_is_left_to_the_host(engine, gqa, another, host, reshaped):
    left = []

    def attention_pytorch(*given, **_kwargs):
        left.append(given)

    def attention_sage(*given, **_kwargs):
        left.append(given)

    shape = (lambda n: (2, 4, n, 32)) if reshaped else (lambda n: (2, n, 4 * 32))
    q, k, v = (torch.randn(shape(n)) for n in (8, 5, 5))
    function = attention_sage if another else attention_pytorch
    engine("attention_kernels").override_for("cudnn")(
        function, q, k, v, 4, skip_reshape=reshaped, **({"enable_gqa": True} if gqa else {})
    )
    assert len(left) == host


@pytest.mark.parametrize(("batch", "host"), [(2**15, 0), (2**15 + 1, 1)])
def test_a_batch_that_pytorchs_kernels_cannot_launch_is_left_to_the_host(engine, survey, batch, host):
    left = []

    def attention_pytorch(*given, **_kwargs):
        left.append(given)

    q = torch.zeros(batch, 1, 2)
    engine("attention_kernels").override_for("efficient")(attention_pytorch, q, q, q, 1)
    assert len(left) == host
    survey(attention_pytorch, q, q, q, 1)
    assert len(survey.calls) == 1 - host


def test_compiled_code_asks_for_no_length(engine):
    override = engine("attention_kernels").override_for("cudnn")

    def block(x, context):
        return override(attention_pytorch, x, x, x, 4) + override(attention_pytorch, x, context, context, 4)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, backend="eager", dynamic=True, fullgraph=True)
    for tokens, keys in ((8, 5), (16, 5), (64, 7), (12, 3)):
        x, context = torch.randn(2, tokens, 64), torch.randn(2, keys, 64)
        torch.testing.assert_close(compiled(x, context), block(x, context))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("choice", ["comfyui", "", "other", "cudnn 40 80", "CHECKPOINT"])
def test_what_is_no_choice_has_no_override(engine, choice):
    assert engine("attention_kernels").override_for(choice) is None


def test_a_layout_makes_a_tensor_of_the_same_place_in_memory(engine):
    layout = engine("tensor_spec").TensorSpec
    packed = torch.randn(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)[1]  # queries, keys and values of one product
    mask = torch.zeros(1, 1, 8, 8).expand(2, 4, 8, 8)
    for tensor in (packed, mask):
        made = layout.of(tensor).zeros()
        assert made.shape == tensor.shape and made.stride() == tensor.stride() and not made.any()


def test_cudnn_makes_no_plan_where_its_result_is_not_wanted(engine, monkeypatch):
    """A plan takes a quarter of a second, and is the thread's. The first call on a card loads cuDNN."""
    attention = engine("torch_compat.attention")
    monkeypatch.setattr(attention.WithoutPlans, "_loaded", set())
    q = torch.ones(1, 16, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
    with attention.WithoutPlans():
        with pytest.raises(NotImplementedError):  # it was called, and this is a CPU
            attention.cudnn_attention(q, q, q)
        attention.WithoutPlans._loaded.add(q.device)
        out = attention.cudnn_attention(q, q, q)
        assert torch.equal(attention.math(q, q, q), q)  # others run
    assert (out.shape, out.dtype, out.device, out.count_nonzero()) == (q.shape, q.dtype, q.device, 0)
    with pytest.raises(NotImplementedError):
        attention.cudnn_attention(q, q, q)


@pytest.mark.parametrize("mode", ["WithoutPlans", "_Noting"])
def test_our_modes_concern_their_own_thread(engine, mode):
    """PyTorch keeps for the process whether a thread is in a mode. Where two overlap it stayed so, and up to 2.10 nothing was
    traced any more."""
    ours, entered, leave = getattr(engine("torch_compat.attention"), mode)(), threading.Event(), threading.Event()

    def enter():
        with ours:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=enter)
    thread.start()
    entered.wait(10)
    is_in_any = torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals
    assert not is_in_any()
    with torch._subclasses.FakeTensorMode():
        leave.set()
        thread.join()
    assert not is_in_any()
