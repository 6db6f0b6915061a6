"""Keys of what CUDA graphs depend on."""

import enum
import functools
import types

import pytest
import torch


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


class Odd:
    def __call__(self):
        return 1


def closure_over(value):
    def function():
        return value

    return function


EQUAL = {
    "numbers": lambda: (1, 2.5, True, None, "x", b"y", 1j),
    "containers": lambda: {"a": [1, (2, {3})], "b": {"c": torch.float16, "d": torch.device("cuda", 1)}},
    "an enumeration": lambda: [Size.SMALL, torch.nn.attention.SDPBackend.MATH],
    "classes and built-in functions": lambda: (dict, len, torch.relu),
    "a function": lambda: closure_over,
    "a partial": lambda: functools.partial(closure_over, 2, value=[3]),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_for_what_is_the_same(engine, make):
    key = engine("cuda_graphs.keys").value_key
    assert key(make()) == key(make()) and hash(key(make())) == hash(key(make()))


DIFFERENT = [
    (1, 1.0), (1, True), (0.0, -0.0), ("1", 1), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: "x"}, {"1": "x"}),
    (Size.SMALL, Size.LARGE), (torch.float16, torch.bfloat16), ([None], []), (closure_over, Odd),
    (functools.partial(closure_over, 1), functools.partial(closure_over, 2)), (torch.Size([1]), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("one, other", DIFFERENT, ids=lambda value: str(value).partition(" at 0x")[0])
def test_different_for_what_a_call_can_tell_apart(engine, one, other):
    key = engine("cuda_graphs.keys").value_key
    assert key(one) != key(other)


def test_what_is_changed_in_place_has_another_key(engine):
    key, options = engine("cuda_graphs.keys").value_key, {"a": [1]}
    before = key(options)
    options["a"].append(2)
    assert key(options) != before


NO_KEY = [
    Odd(), Odd().__call__, [Odd()], {"a": Odd()}, closure_over(1), functools.partial(Odd()), types, torch.zeros(1),
    closure_over(torch.zeros(1)), torch.nn.Identity(), types.SimpleNamespace(a=1), {Odd(): 1},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_KEY, ids=lambda value: type(value).__name__)
def test_no_key_for_what_may_change_unseen(engine, value):
    keys = engine("cuda_graphs.keys")
    with pytest.raises(keys.NoKey):
        keys.value_key(value)


def test_of_inputs_the_data_do_not_count(engine):
    keys = engine("cuda_graphs.keys")

    def key(tensor, **others):
        return keys.value_key(([tensor], others), inputs=True)

    assert key(torch.zeros(2, 3)) == key(torch.ones(2, 3))
    others = [torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(2, 3).half(), torch.zeros(2, 3, device="meta")]
    assert len({key(tensor) for tensor in [torch.zeros(2, 3), *others]}) == 5
    assert key(torch.zeros(1), a=1) != key(torch.zeros(1), a=2)
    for hidden in (closure_over(torch.zeros(1)), functools.partial(print, torch.zeros(1)), torch.zeros(1).as_subclass(Packed)):
        with pytest.raises(keys.NoKey):
            key(torch.zeros(1), hidden=hidden)


class Packed(torch.Tensor):
    """A tensor class of another pack."""
