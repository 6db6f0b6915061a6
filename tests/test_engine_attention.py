"""What a model asks its attention for, and which of that is measured."""

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
    return engine("attention").AttentionSurvey("auto")


def test_it_counts_calls_by_layout_and_keeps_no_tensor(engine, survey):
    for tokens in (4096, 4096, 77):
        survey(attention_pytorch, *tensors(tokens), 4)
    survey(attention_pytorch, *tensors(4096), 4, mask=torch.zeros(4096, 4096))
    assert sorted(survey.calls.values()) == [1, 1, 2]
    layouts = [part for call in survey.calls for part in call if part is not None]
    assert all(isinstance(layout, engine("attention")._Layout) for layout in layouts)


def test_the_users_own_kernel_is_not_counted(survey):
    survey(attention_sage, *tensors(16), 4)
    survey(attention_pytorch, *tensors(16), 4, enable_gqa=True)
    assert not survey.calls and survey.best() == "host"


def test_only_the_calls_that_make_up_most_of_the_work_are_measured(engine, survey):
    for tokens, keys, count in ((4096, 4096, 5), (1024, 1024, 5), (4096, 77, 5), (64, 64, 1)):  # SD 1.5
        for _ in range(count):
            survey(attention_pytorch, *tensors(tokens, keys), 4)
    chosen = engine("attention")._costliest(survey.calls)
    assert [(call[0].shape[2], call[1].shape[2], count) for call, count in chosen.items()] == [(4096, 4096, 5)]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"flash": 1.0, "cudnn": 0.5, "efficient": 2.0}, "cudnn"),
        ({"flash": 1.0, "cudnn": 0.97, "efficient": 2.0}, "host"),
        ({"flash": float("inf"), "cudnn": float("inf"), "efficient": 2.0}, "efficient"),
        ({"flash": float("inf"), "cudnn": float("inf"), "efficient": float("inf")}, "host"),
    ],
)
def test_the_fastest_is_chosen_if_it_is_worth_it(engine, survey, monkeypatch, seconds, best):
    monkeypatch.setattr(engine("attention"), "_seconds", lambda kernel, _call: seconds[kernel])
    survey(attention_pytorch, *tensors(32), 4)
    assert survey.best() == best


def test_a_layout_makes_a_tensor_of_the_same_place_in_memory(engine):
    layout = engine("attention")._Layout
    packed = torch.randn(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)[1]  # queries, keys and values of one product
    mask = torch.zeros(1, 1, 8, 8).expand(2, 4, 8, 8)
    for tensor in (packed, mask):
        made = layout.of(tensor).zeros()
        assert made.shape == tensor.shape and made.stride() == tensor.stride() and not made.any()
