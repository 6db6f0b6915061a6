"""What the pack reads of objects that the compiler of PyTorch makes: counters, guards, callbacks, metrics."""

import importlib
import inspect

import pytest
import torch


@pytest.fixture
def compiled():
    """A function that has been compiled for two shapes, and what PyTorch's callbacks were told meanwhile."""
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.utils import counters

    def double(x):
        return x * 2

    told = []
    before = counters["stats"]["unique_graphs"]
    callback_handler.register_start_callback(told.append)
    try:
        code = torch.compile(double, backend="eager", dynamic=False)
        for width in (2, 3):
            code(torch.ones(width))
    finally:
        callback_handler.start_callbacks.remove(told.append)
    return double, counters["stats"]["unique_graphs"] - before, told


def test_compiled_graphs_are_counted_and_callbacks_told_what_for(compiled):
    _, graphs, told = compiled
    assert graphs == 2 and [args.callback_trigger.name for args in told] == ["DYNAMO", "DYNAMO"]


def test_each_variant_has_its_guards_until_its_code_is_reset(compiled):
    double, _, _ = compiled
    frames = torch._C._dynamo.eval_frame
    entries = frames._debug_get_cache_entry_list(double.__code__)
    assert len(entries) == 2 and all(entry.guard_manager is not None for entry in entries)
    frames.reset_code(double.__code__)
    assert frames._debug_get_cache_entry_list(double.__code__) == []


def test_a_recompilation_has_its_reason(compiled):
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics()[-2:]]
    assert reasons[0] is None and "size mismatch" in reasons[1]


def test_a_break_is_counted_by_its_reason():
    from torch._dynamo.utils import counters

    def broken(x):
        torch._dynamo.graph_break()
        return x * 2

    before = sum(counters["graph_break"].values())
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert sum(counters["graph_break"].values()) == before + 1


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("torch._inductor.codecache", '"fxgraph_cache_hit"'),
        ("torch._dynamo.guards", "class DeletedGuardManagerWrapper"),
        ("torch._dynamo.callback", "LAZY_BACKWARD"),
        ("torch._inductor.async_compile", "def wait_pool_ready"),
        ("torch._inductor.codegen.simd_kernel_features", "reduction_numel"),
    ],
)
def test_what_is_looked_for_in_vain_elsewhere_has_its_name(module, words):
    """Where another name would only mean that something is not noticed."""
    assert words in inspect.getsource(importlib.import_module(module))
