"""What the code of a patch reads, and what a block is made of right now."""

import functools

import pytest
from support import Block
from torch import nn


def looks_up(n, extra_options):
    return n * extra_options["n_heads"] if "sigmas" in extra_options else n * extra_options.get("block_index", 0)


def by_keyword(q, k, v, pe=None, attn_mask=None, extra_options=None):
    return {"q": q * extra_options["block_index"]}


def loops(n, extra_options):
    return sum(1 for _ in extra_options)


def hands_on(n, extra_options):
    return looks_up(n, extra_options)


def renames(n, extra_options):
    options = extra_options
    return options["block"]


def captures(n, extra_options):
    return (lambda: extra_options["block"])()


def takes_the_rest(n, **kwargs):
    return n


def of_one_dict(arguments, b=1, c=2, d=3):
    return arguments["transformer_options"]["block_index"]


class Patch:
    def __call__(self, q, k, v, extra_options):
        return q * extra_options["uuids"]

    def method(self, n, extra_options):
        return n


@pytest.mark.parametrize(
    "name, patch, keys",
    [
        ("attn1_output_patch", looks_up, {"n_heads", "sigmas", "block_index"}),
        ("attn1_patch", by_keyword, {"block_index"}),
        ("attn1_patch", Patch(), {"uuids"}),
        ("attn1_output_patch", Patch().method, set()),
        ("attn1_output_patch", loops, None),
        ("attn1_output_patch", hands_on, None),
        ("attn1_output_patch", renames, None),
        ("attn1_output_patch", captures, None),
        ("attn1_output_patch", takes_the_rest, None),
        ("attn1_output_patch", functools.partial(looks_up), None),
        ("attn1_output_patch", nn.Linear(2, 2), None),
        ("attn1_output_patch", print, None),
        ("attn1_patch", of_one_dict, None),
        ("a_kind_nobody_knows", looks_up, None),
    ],
)
def test_keys_of_a_patch(engine, name, patch, keys):
    assert engine("options.patches").keys_of_patch(name, patch) == (None if keys is None else frozenset(keys))


def passes_all(func, *args, **kwargs):
    return func(*args, **kwargs)


def wrapping(kernel):
    def override(func, *args, **kwargs):
        return kernel(*args, **kwargs)

    return override


def reading(q, k, v, heads, **kwargs):
    return q * kwargs["transformer_options"]["block_index"]


def plain_kernel(q, k, v, heads, **kwargs):
    return q


COUNT = {"calls": 0}


def counts(func, *args, **kwargs):
    COUNT["calls"] += 1
    return plain_kernel(*args, **kwargs) * COUNT["calls"]


class Holder:
    def run(self, *args, **kwargs):
        return reading(*args, **kwargs)

    def override(self, func, *args, **kwargs):
        return self.run(*args, **kwargs)


@pytest.mark.parametrize(
    "override, keys",
    [
        (passes_all, frozenset()),
        (wrapping(plain_kernel), frozenset()),
        (wrapping(reading), None),
        (wrapping(Holder().run), None),
        (Holder().override, None),
        (reading, None),
        (counts, None),
    ],
)
def test_keys_of_an_attention_override(engine, override, keys):
    assert engine("options.patches").keys_of_patch("optimized_attention_override", override) == keys


def test_a_state_notices_layers_forwards_and_hooks(engine):
    block, methods = Block(), engine("blocks.state").MethodsNow()

    def state_of(block):
        return engine("blocks.state").BlockState(block, methods, {})

    state = state_of(block)
    assert state.holds(block, methods)
    layer = block.inner
    block.inner = nn.Linear(8, 8)
    assert not state.holds(block, methods)
    block.inner = layer
    assert state.holds(block, methods)
    layer.forward = layer.forward
    assert state.holds(block, methods) and "forward" not in layer.__dict__, "its own forward is nothing new"
    layer.forward = lambda x: x
    assert not state.holds(block, methods) and state_of(block).forwards
    del layer.forward
    hook = layer.register_forward_hook(lambda *_: None)
    assert not state.holds(block, methods) and state_of(block).hooked == ("inner",)
    hook.remove()
    assert state.holds(block, methods)


@pytest.mark.host
def test_patches_and_place_as_a_block_gets_them(engine):
    from comfy.ldm.modules.attention import BasicTransformerBlock

    options = {
        "block": ("input", 4),
        "block_index": 3,
        "sigmas": 1,
        "patches": {"output_block_patch": [print], "attn1_output_patch": [loops]},
        "patches_replace": {"attn1": {("input", 4): Patch(), ("input", 5): print}},
    }
    filtered = engine("options.filter").OptionsFilter(BasicTransformerBlock(8, 1, 8))
    given, names = filtered(options)
    assert given is options and len(names) == 2, "an unknown callable gets everything"
    options["patches"] = {"output_block_patch": [print]}
    given, names = filtered(options)
    assert set(given) == {"patches", "patches_replace", "block"}
    assert given["patches"] == {} and given["block"] == ("block", 0)
    assert list(given["patches_replace"]["attn1"]) == [("block", 0)]
    given, names = filtered({**options, "block": ("input", 7)})
    assert not names and given == {"patches": {}, "patches_replace": {}}
