"""Blocks that are given their attention as a closure, with keys and values kept for each block: the shape of Qwen-Image 2.1.

That model is of a newer ComfyUI than we can run. What is modelled here, in words of our own: one function a block and step,
which closes over `transformer_options` (with `block_index` in it), the block's number and a cache. The first step of a sampling
run fills the cache from the tokens of the text; all steps read it, and run on the tokens of the image alone.
"""

import functools

import pytest
import torch
from support import CompiledNet
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention, silu

pytestmark = pytest.mark.usefixtures("inference_mode")
WIDTH, HEADS, TEXT = 16, 2, 5


def attention(q, k, v, transformer_options):
    override = transformer_options.get("optimized_attention_override")
    if override is not None:
        return override(attention, q, k, v)
    return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)


class PrefixCache:
    """Keys and values of the text, by block."""

    def __init__(self):
        self.slot = {"blocks": {}}

    def put(self, i, kv):
        self.slot["blocks"][i] = kv[:1].clone()

    def take(self, i, batch):
        return self.slot["blocks"][i].repeat(batch, 1, 1, 1, 1)


def causal(segments, transformer_options, cache=None, block_index=0, prefix=0):
    def attend(q, k, v):
        if cache is not None:
            cache.put(block_index, torch.stack([k[:, :prefix], v[:, :prefix]], dim=1))
        return torch.cat([attention(q[:, a:b], k[:, :b], v[:, :b], transformer_options) for a, b in segments], dim=1)

    return attend


def behind(prefix_k, prefix_v, transformer_options):
    def attend(q, k, v):
        return attention(q, torch.cat([prefix_k, k], dim=1), torch.cat([prefix_v, v], dim=1), transformer_options)

    return attend


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, pe, attn_fn, prefix, transformer_options):
        q, k, v = self.to_qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        for patch in transformer_options.get("patches", {}).get("attn1_patch", []):
            q, k, v = patch(q, k, v, extra_options={**transformer_options, "img_slice": [prefix, x.shape[1]]})
        return self.to_out(attn_fn(q * pe, k * pe, v))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.up, self.down = Attention(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mod, pe, attn_fn, prefix, transformer_options={}):  # noqa: B006  as the host writes it
        y = self.attn(layer_norm(x, x.shape[-1:]) * mod[:, None], pe, attn_fn, prefix, transformer_options)
        x[:, prefix:].add_(y[:, prefix:] * mod[:, None])
        if prefix:
            x[:, :prefix].add_(y[:, :prefix])
        return x + self.down(silu(self.up(x)))


class Net(nn.Module):
    """Each block is called by a function made for it, as a queue that fetches weights calls it."""

    def __init__(self, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.requires_grad_(False)
        self.cache = None

    def forward(self, x, text, sigma, transformer_options, cached=True):
        """x: (batch, tokens, WIDTH); text: (1, TEXT, WIDTH); sigma: a number."""
        mod = torch.full((1, WIDTH), 1 + sigma)
        pe = torch.linspace(0.5, 1, TEXT + x.shape[1])[None, :, None, None]
        text, options = text.expand(len(x), -1, -1).clone(), transformer_options
        filled = self.cache is not None
        if cached and not filled:
            self.cache = PrefixCache()
        if not cached:
            x, parts = torch.cat([text, x], dim=1), ((0, TEXT), (TEXT, TEXT + x.shape[1]))
        for i, block in enumerate(self.blocks):
            options["block_index"] = i
            if not cached:
                attn_fn, prefix, ids = causal(parts, options, None, i, TEXT), TEXT, pe
            else:
                if not filled:
                    fill = causal(((0, TEXT),), options, self.cache, i, TEXT)
                    text = block(text, mod, pe[:, :TEXT], fill, TEXT, options)
                attn_fn, prefix, ids = behind(*self.cache.take(i, len(x)).unbind(1), options), 0, pe[:, TEXT:]

            def core(x=x, block=block, attn_fn=attn_fn, prefix=prefix, ids=ids):
                return block(x, mod, ids, attn_fn, prefix, options)

            x = core()
        return x if cached else x[:, TEXT:]


def sample(net, call=None, cached=True, batch=2, tokens=6, steps=3, **options):
    """What the steps of one sampling run give.

    Args:
        call: calls the model, if `net` itself is not to be called.
    """
    draw = torch.Generator().manual_seed(1)
    x, text = torch.randn(batch, tokens, WIDTH, generator=draw), torch.randn(1, TEXT, WIDTH, generator=draw)
    net.cache, results = None, []
    for step in range(steps):
        sigma = 1 / (step + 1)
        given = {"sigmas": torch.tensor([sigma]), "uuids": [object()], "cond_or_uncond": [1, 0], "patches": {}, **options}
        results.append((call or net)(x.clone(), text, sigma, given, cached))
    return torch.stack(results)


@pytest.fixture(params=["in the background", "at once"])
def run(engine, request):
    """run(net, **what) samples compiled, compares with eager, waits for code, and returns how many graphs that added."""
    before = 0

    def compiled(net, **what):
        nonlocal before
        step, expected = CompiledNet(engine, net), sample(net, **what)
        call = step.at_once if request.param == "at once" else lambda *args: step(*args)[0]
        assert torch.equal(sample(net, call, **what), expected)
        count = step.wait()
        assert not step.failures and not step.graph_breaks
        added, before = count - before, count
        return added

    return compiled


def test_without_a_cache_all_blocks_and_steps_share_a_graph(run):
    net = Net()
    assert run(net, cached=False) == 1
    assert run(net, cached=False) == 0


def test_with_a_cache_blocks_share_the_graph_that_reads_it(run):
    net = Net()
    assert run(net) == 1
    assert run(net) == 0


def test_the_report_says_what_is_not_compiled(run, engine):
    net = Net()
    code = engine("compile.registry").code_of(net)
    run(net, cached=False)
    assert code.eager_in_words() == []
    run(net)
    (said,) = code.eager_in_words()
    assert said.startswith("Block: calls that fill a cache run uncompiled, as each block would need code of its own")


def test_a_function_that_holds_an_object_is_told_from_others(engine):
    holds, tensor, options = engine("transformer_options.arguments").is_given_an_object, torch.zeros(2), {"uuids": [object()]}
    fill, unset = causal(((0, 2),), options, PrefixCache(), 1, 2), [lambda: later]
    assert holds((tensor, 3, fill), {}) and holds((), {"attn_fn": functools.partial(lambda f, q: f(q), fill)})
    assert holds((tensor,), {"attn_fn": PrefixCache().put}) and holds((lambda q: [f(q) for f in [fill]],), {})
    assert not holds((tensor, behind(tensor, tensor, options), 3), {"transformer_options": options, "cache": PrefixCache()})
    assert not holds((causal(((0, 2),), options, None, 1, 2),), {}) and not holds((silu, *unset), {"f": nn.Linear(1, 1)})
    draw = torch.Generator()
    assert not holds((lambda q: torch.rand(1, generator=draw),), {})
    del options
    later = None


def test_other_sizes_add_what_they_add_for_other_blocks(run):
    net = Net()
    assert [run(net), run(net, tokens=9), run(net, batch=1)] == [1, 0, 1]
    assert [run(net, batch=3, tokens=7), run(net, batch=1, tokens=8), run(net, tokens=9), run(net)] == [0] * 4


def test_more_blocks_than_variants_stay_compiled(run):
    """The model has 32 blocks; a group may have 8 variants or so, and runs eager at new shapes when it has them."""
    net = Net(count=24)
    assert [run(net), run(net, tokens=9), run(net, batch=3, tokens=7)] == [1, 0, 0]


def test_an_override_of_attention_reaches_the_closure(run):
    net = Net()
    run(net)

    def doubled(function, q, k, v):
        return function(2 * q, k, v, {})

    plain = sample(net)
    assert not torch.equal(plain, sample(net, optimized_attention_override=doubled))
    run(net, optimized_attention_override=doubled)
    assert run(net) == 0
