"""Attention's inputs computed token by token: the same values, fewer copies, and still found in PyTorch's caches."""

import pytest
import torch
from support import compiled_code
from torch.nn import functional

pytestmark = pytest.mark.host
HEADS, DIM = 3, 16


def projected(tokens, seed=1):
    return torch.randn(2, tokens, 3 * HEADS * DIM, generator=torch.Generator().manual_seed(seed))


def frequencies(tokens):
    from comfy.ldm.flux.math import rope

    return rope(torch.rand(1, tokens, generator=torch.Generator().manual_seed(1)) * 64, DIM, 10000).unsqueeze(1)


def split(qkv):
    return qkv.view(qkv.shape[0], qkv.shape[1], 3, HEADS, -1).permute(2, 0, 3, 1, 4)


def normed(q, k, v, scale):
    return tuple(torch.rms_norm(x, (DIM,), scale).to(v) for x in (q, k))


def attended(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(q.shape[0], -1, HEADS * DIM)


def single_block(qkv, freqs, scale):
    q, k, v = split(qkv)
    return attended(*torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs), v)


def double_block(text, image, freqs, scale):
    parts = []
    for qkv in (text, image):
        q, k, v = split(qkv)
        parts.append((*normed(q, k, v, scale), v))
    q, k, v = (torch.cat(both, 2) for both in zip(*parts, strict=True))
    return attended(*torch.ops.comfy_kitchen.apply_rope(q, k, freqs), v)


class Recorder(torch.fx.Interpreter):
    """Runs a graph and notes of each input of attention whether the heads of a token lie together."""

    def __init__(self, graph):
        super().__init__(graph)
        self.together = []

    def run_node(self, node):
        if node.target is functional.scaled_dot_product_attention:
            self.together += [self.env[tensor].stride(1) < self.env[tensor].stride(2) for tensor in node.args[:3]]
        return super().run_node(node)


@pytest.mark.parametrize("block", [single_block, double_block])
def test_blocks_as_flux_has_them(block, everywhere):
    from torch._dynamo.utils import counters

    tokens = (12,) if block is single_block else (5, 7)
    given = *(projected(n, n) for n in tokens), frequencies(12), torch.rand(DIM) + 0.5
    recorders = []
    rewrites = everywhere.REWRITES if block is double_block else everywhere.REWRITES[1:]

    def recording(graph, example_inputs):
        changed = [rewrite(graph.graph) for rewrite in rewrites]
        assert all(changed)
        graph.graph.lint()
        graph.recompile()
        recorders.append(Recorder(graph))
        return recorders[-1].run

    with torch.inference_mode():
        expected = block(*given)
        bypassed = counters["aot_autograd"]["autograd_cache_bypass"]
        actual, _ = compiled_code(block, everywhere.inductor, given)
        assert counters["aot_autograd"]["autograd_cache_bypass"] == bypassed
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.compile(block, backend=recording, fullgraph=True)(*given), expected)
    assert [recorder.together for recorder in recorders] == [[True] * 3]


@pytest.mark.parametrize("backend", ["rewritten", pytest.param("inductor", marks=pytest.mark.rest)])
def test_one_graph_serves_all_sizes(everywhere, backend):
    from torch._inductor.utils import fresh_cache

    def rewritten(graph, example_inputs):
        for rewrite in everywhere.REWRITES[1:]:
            assert rewrite(graph.graph)
        graph.recompile()
        return graph

    backend = everywhere.inductor if backend == "inductor" else rewritten
    compiled = torch.compile(single_block, backend=backend, dynamic=True, fullgraph=True)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.inference_mode(), fresh_cache():
        for tokens in (6, 9, 30):
            given = projected(tokens), frequencies(tokens), torch.rand(DIM) + 0.5
            torch.testing.assert_close(compiled(*given), single_block(*given))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def in_order(qkv, freqs, scale):
    """Heads lie apart from the start."""
    q, k, v = split(qkv).contiguous()
    return attended(*torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs), v)


def used_elsewhere(qkv, freqs, scale):
    q, k, v = split(qkv)
    q, k = torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs)
    return attended(q, k, v), q.sum(), k.sum()


def changed_in_place(qkv, freqs, scale):
    q, k, v = split(qkv)
    q, k = torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs)
    q.mul_(2)
    k.add_(1)
    return attended(q, k, v)


def rotated_by_head(qkv, freqs, scale):
    q, k, v = split(qkv)
    return attended(*torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs.expand(-1, HEADS, -1, -1, -1, -1)), v)


def cut_off(qkv, freqs, scale):
    q, k, v = split(qkv)
    return attended(*torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), torch.cat((freqs, freqs), 2)), v)


@pytest.mark.parametrize("function", [in_order, used_elsewhere, changed_in_place, rotated_by_head, cut_off])
def test_what_cannot_be_turned_stays(function, engine):
    rewrite = engine("inductor.token_major").heads_of_a_token_together
    changed = []

    def backend(graph, example_inputs):
        changed.append(rewrite(graph.graph))
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(projected(6), frequencies(6), torch.ones(DIM))
    assert changed == [False]


def test_one_of_two_rotated_tensors(engine):
    """The other one is needed as it is."""
    rewrite = engine("inductor.token_major").heads_of_a_token_together

    def only_queries(qkv, freqs, scale):
        q, k, v = split(qkv)
        q, k = torch.ops.comfy_kitchen.apply_rope(*normed(q, k, v, scale), freqs)
        return attended(q, k, v), k.sum()

    def backend(graph, example_inputs):
        assert rewrite(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return graph

    given = projected(6), frequencies(6), torch.rand(DIM) + 0.5
    torch.testing.assert_close(torch.compile(only_queries, backend=backend, fullgraph=True)(*given), only_queries(*given))
