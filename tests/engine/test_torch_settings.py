"""Settings of PyTorch for a while: two threads that overlap leave none behind, whether or not each has its own."""

import threading

import pytest
import torch
from support import torch_settings

SCOPES = {
    "sampling": lambda found: (found.sampling_scope, found.sampling_switches(True, True)),
    "compiling": lambda found: (found.compile_scope, {"recompile_limit": 77, "specialize_float": False}),
    "attention": lambda found: (found.attention_scope, {"attention_order": torch._C._get_sdp_priority_order()[::-1]}),
}


def everything():
    return torch_settings(), torch._C._get_sdp_priority_order()


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_threads_that_overlap(name, first_out, engine):
    before, seen = everything(), []
    enter, leave = ([threading.Event(), threading.Event()] for _ in range(2))
    entered, left = ([threading.Event(), threading.Event()] for _ in range(2))

    def work(index):
        scope, values = SCOPES[name](engine("torch_settings"))
        own = everything()
        assert enter[index].wait(30)
        with scope.applied(**values):
            seen.append(everything() != own)
            entered[index].set()
            assert leave[index].wait(30)
        seen.append(everything() == own or not left[1 - index].is_set())
        left[index].set()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for index in (0, 1):
        enter[index].set()
        assert entered[index].wait(30)
    for index in (first_out, 1 - first_out):
        leave[index].set()
        assert left[index].wait(30)
    for thread in threads:
        thread.join(30)
    assert everything() == before and seen.count(True) == 4


@pytest.mark.parametrize("name", SCOPES)
def test_an_error_inside_leaves_nothing(name, engine):
    before = everything()
    scope, values = SCOPES[name](engine("torch_settings"))
    with pytest.raises(KeyError), scope.applied(**values):
        assert everything() != before
        raise KeyError("inside")
    assert everything() == before
