"""Sums written into a tensor, where gradients are wanted: those of the same sums written out of place."""

import pytest
import torch
from support import without_codegen
from torch.nn import functional

DIM = 8


@pytest.fixture
def traced_graph(engine):
    return engine("compile.traced_graph")


def given(*dtypes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 5, DIM, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


def results_and_gradients(function, inputs):
    """What `function` returns, and the gradients; a block is never given leaves, which autograd lets nobody write into."""
    out = function(*(t * 1 for t in inputs))
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float32).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def backend_of(traced_graph, name):
    """What blocks get, without the wait for code."""

    def backend(graph, inputs):
        traced_graph.prepare(graph, inputs)
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    return backend


def check(traced_graph, function, out_of_place, dtypes=(torch.float32,) * 3, backend="aot_eager"):
    compiled = torch.compile(function, backend=backend_of(traced_graph, backend), fullgraph=True)
    actual = results_and_gradients(compiled, given(*dtypes))
    expected = results_and_gradients(out_of_place, given(*dtypes))
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    assert all(t.any() for t in expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def norm(x):
    return functional.layer_norm(x, (DIM,))


def changed(engine, function, inputs):
    """What `out_of_place` returns for the graph of `function`, and whether the graph is another one then."""
    rewrite, found = engine("out_of_place").out_of_place, []

    def backend(graph, _inputs):
        before = str(graph.graph)
        found.append((rewrite(graph.graph), str(graph.graph) != before))
        graph.graph.lint()
        graph.recompile()
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (result,) = found
    return result


def kept_by_a_norm(x, y, z):
    kept = norm(x)
    x += y * z
    return x * kept


def kept_by_a_norm_out_of_place(x, y, z):
    return (x + y * z) * norm(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_sum_written_into_what_a_norm_has_kept(traced_graph, monkeypatch, backend):
    if backend == "inductor":
        without_codegen(monkeypatch)
    with pytest.raises(RuntimeError, match="inplace"):
        results_and_gradients(kept_by_a_norm, given(*(torch.float32,) * 3))
    check(traced_graph, kept_by_a_norm, kept_by_a_norm_out_of_place, backend=backend)


def two_sums(x, y, z):
    first = norm(x)
    x += y
    second = norm(x)
    x += z
    return x * first * second


def two_sums_out_of_place(x, y, z):
    between = x + y
    return (between + z) * norm(x) * norm(between)


def two_sums_of_an_intermediate(x, y, z):
    return two_sums(x * 2, y, z)


def two_sums_of_an_intermediate_out_of_place(x, y, z):
    return two_sums_out_of_place(x * 2, y, z)


def read_by_the_older_name(x, y, z):
    same, kept = x, norm(x)
    x += y
    kept = kept * norm(same)
    same += z
    return x * kept


def read_by_the_older_name_out_of_place(x, y, z):
    return (x + y + z) * norm(x) * norm(x + y)


@pytest.mark.parametrize(
    ("function", "out_of_place"),
    [
        (two_sums, two_sums_out_of_place),
        (two_sums_of_an_intermediate, two_sums_of_an_intermediate_out_of_place),
        (read_by_the_older_name, read_by_the_older_name_out_of_place),
    ],
)
def test_chains_of_sums(traced_graph, function, out_of_place):
    check(traced_graph, function, out_of_place)


def by_methods(x, y, z):
    kept = norm(x)
    x.add_(y, alpha=0.5).mul_(2.0)
    kept = kept * norm(x)
    x.sub_(z).div_(4.0)
    return x * kept


def by_methods_out_of_place(x, y, z):
    between = (x + 0.5 * y) * 2.0
    return (between - z) / 4.0 * norm(x) * norm(between)


def by_operators(x, y, z):
    kept = norm(x)
    x -= y
    x *= z
    kept = kept * norm(x)
    x /= 4.0
    return x * kept


def by_operators_out_of_place(x, y, z):
    between = (x - y) * z
    return between / 4.0 * norm(x) * norm(between)


@pytest.mark.parametrize(
    ("function", "out_of_place"), [(by_methods, by_methods_out_of_place), (by_operators, by_operators_out_of_place)]
)
def test_all_that_is_written_out_of_place(traced_graph, function, out_of_place):
    check(traced_graph, function, out_of_place)


def test_a_tensor_keeps_its_dtype(traced_graph):
    def out_of_place(x, y, z):
        return (x + y * z).to(x.dtype) * norm(x)

    check(traced_graph, kept_by_a_norm, out_of_place, (torch.bfloat16, torch.float32, torch.float32))


def with_a_view(x, y, z):
    flat = x.view(-1)
    x += y
    return flat * z.reshape(-1)


def with_a_view_of_an_intermediate(x, y, z):
    return with_a_view(x * 2, y, z)


def with_a_view_between(x, y, z):
    x = x * 2
    x += y
    flat = x.view(-1)
    x += z
    return flat * 3


def with_a_part(x, y, z):
    x = x * 2
    part = x[:, 2:]
    x += y
    return part * z.sum()


def into_a_view(x, y, z):
    x = x * 2
    flat = x.view(-1)
    flat += y.reshape(-1)
    return x * z


@pytest.mark.parametrize(
    "function", [with_a_view, with_a_view_of_an_intermediate, with_a_view_between, with_a_part, into_a_view]
)
def test_a_tensor_with_a_view_is_left_as_it_is(engine, traced_graph, function):
    assert changed(engine, function, [t * 1 for t in given(*(torch.float32,) * 3)]) == (False, False)
    torch._dynamo.reset()
    check(traced_graph, function, function)


def test_the_rewrite_says_that_it_did(engine):
    assert changed(engine, kept_by_a_norm, [t * 1 for t in given(*(torch.float32,) * 3)]) == (True, True)
    assert changed(engine, kept_by_a_norm_out_of_place, [t * 1 for t in given(*(torch.float32,) * 3)]) == (False, False)


def test_integers_are_left_as_they_are(engine):
    def count(x, n):
        n += 1
        return x * n

    assert changed(engine, count, [given(torch.float32)[0] * 1, torch.ones(DIM, dtype=torch.int64)]) == (False, False)


def test_without_gradients_sums_stay_in_place(traced_graph, monkeypatch):
    asked, rewrite = [], traced_graph.out_of_place
    monkeypatch.setattr(traced_graph, "out_of_place", lambda graph: asked.append(graph) or rewrite(graph))
    compiled = torch.compile(kept_by_a_norm, backend=backend_of(traced_graph, "eager"), fullgraph=True)
    for context, inputs in (
        (torch.no_grad, given(*(torch.float32,) * 3)),
        (torch.inference_mode, [t.detach() for t in given(*(torch.float32,) * 3)]),
        (torch.enable_grad, [t.detach() for t in given(*(torch.float32,) * 3)]),
    ):
        with context():
            x, y, z = (t * 1 for t in inputs)
            before = x.clone()
            compiled(x, y, z)
            torch.testing.assert_close(x, before + y * z)
    assert not asked
    x, y, z = (t * 1 for t in given(*(torch.float32,) * 3))
    before = x.detach().clone()
    compiled(x, y, z)
    assert len(asked) == 1 and torch.equal(x, before), "what the block's caller has stays"


def test_a_tensor_of_which_the_block_has_another_view(engine):
    """As an input it may be a view itself: what it shares memory with is known by the root of both."""

    def block(x, w):
        first = x[:, :1]
        x += w
        return first * 2 + x.sum()

    whole = torch.ones(2, 10, DIM)
    assert changed(engine, block, (whole[:, :5], torch.ones(2, 5, DIM))) == (False, False)
    torch._dynamo.reset()
    assert changed(engine, block, (torch.ones(2, 5, DIM), torch.ones(2, 5, DIM))) == (False, False)
