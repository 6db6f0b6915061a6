"""Stored code is compared with eager before it is used, and neither call is seen from outside."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def check(engine):
    return engine("trace_check")


def doubled(x, options):
    return x * 2


def test_errors_are_relative_and_the_largest_counts(check):
    x = torch.randn(2, 3, 4)
    for factor, error in ((1, 0.0), (1.01, 0.01), (0.5, 0.5)):
        found = check.error_of(lambda x, o, f=factor: (x, [doubled(x, o) * f]), lambda x, o: (x, [doubled(x, o)]), (x, {}), {})
        assert found == pytest.approx(error, rel=1e-3)
    zeros = torch.zeros(3)
    assert check.error_of(torch.clone, torch.clone, (zeros,), {}) == 0
    assert check.error_of(torch.neg, torch.clone, (zeros + float("nan"),), {}) > check.TOLERANCE


@pytest.mark.parametrize(
    "other",
    [
        lambda x, o: x[:1] * 2,
        lambda x, o: (x * 2).double(),
        lambda x, o: [x * 2],
        lambda x, o: None,
        lambda x, o: doubled(x.mul_(1.5), o) / 1.5,
        lambda x, o: o.update(step=1) or x * 2,
        lambda x, o: o["kept"].append(x) or x * 2,
        lambda x, o: o["kept"][0].zero_() + x * 2,
    ],
    ids=["shape", "dtype", "form", "nothing", "input changed", "key", "list", "tensor in a list"],
)
def test_what_else_may_differ(check, other):
    x, options = torch.randn(2, 3, 4), {"kept": [torch.zeros(3, 1) + 1], "step": 0}
    before = x.clone()
    assert check.error_of(other, doubled, (x, options), {}) > check.TOLERANCE
    assert torch.equal(x, before) and options["step"] == 0 and len(options["kept"]) == 1 and options["kept"][0].all()


def test_random_numbers_stay_as_they_would_be(check):
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    assert check.error_of(lambda x: x * torch.rand(2), lambda x: x * torch.rand(2), (torch.ones(2),), {}) == 0
    assert torch.equal(torch.rand(2), wanted)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, 1:3],
        lambda x: x.transpose(0, 1),
        lambda x: x[:1].expand(4, 6),
        lambda x: x[::2, ::3],
        lambda x: x[:0],
    ],
    ids=["whole", "cut", "turned", "expanded", "every other", "empty"],
)
def test_copies_lie_as_what_they_copy(check, view):
    x = view(torch.randn(4, 6))
    copy = check.copy_in_layout(x)
    assert torch.equal(copy, x) and copy.stride() == x.stride() and (not x.numel() or copy.data_ptr() != x.data_ptr())


def test_arguments_that_are_one_stay_one(check):
    x = torch.randn(3)
    assert check.error_of(lambda a, b: a is b, lambda a, b: True, (x, x), {}) == 0


def test_types_without_arithmetic_and_classes_without_equality(check):
    x = torch.randn(64)
    eighth = lambda x: x.to(torch.float8_e4m3fn)  # noqa: E731
    assert check.error_of(lambda x: eighth(x), eighth, (x,), {}) == 0
    assert 0 < check.error_of(lambda x: eighth(x * 1.05), eighth, (x,), {}) < 0.2
    assert check.error_of(lambda x: slice(x), lambda x: slice(x), (x,), {}) == float("inf"), "what is in it is not compared"
    assert check.error_of(lambda x: check, lambda x: check, (x,), {}) == 0
