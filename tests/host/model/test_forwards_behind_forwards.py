"""Forwards of single layers that call another function, which alone reads what is sampled.

The options that a block gets are filtered for what the first block's code reads. A forward that hands them on may read any:
blocks get all then, and run eager where each place needs a graph of its own; the image is right either way.
"""

import functools
import types

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Patch:
    def __init__(self, function):
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def decorated(function):
    def forward(*args, **kwargs):
        return function(*args, **kwargs)

    return forward


def constant(plain, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006  as the host writes it
    return plain(x, context=context, value=value, mask=mask, transformer_options=transformer_options) * 1.1


def placed(plain, x, context=None, value=None, mask=None, transformer_options={}):  # noqa: B006
    out = plain(x, context=context, value=value, mask=mask, transformer_options=transformer_options)
    later = transformer_options.get("sigmas", torch.zeros(1))[0] < 5
    return out * (1.1 if transformer_options.get("block", ("", 0))[0] == "middle" else 0.7 + 0.5 * later)


WAYS = {
    "a decorator": decorated,
    "a method of an object": lambda function: Patch(function).forward,
    "a partial of a decorator": lambda function: functools.partial(decorated(decorated(function))),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_given_forward_calls_is_exchanged(tiny, engine, way):
    runs = Runs(tiny, engine, "sdxl")

    def given(patcher, function):
        clone = patcher.clone()
        for name, module in patcher.model.diffusion_model.named_modules():
            if name.endswith("attn1"):
                plain = types.MethodType(type(module).forward, module)
                clone.add_object_patch(f"diffusion_model.{name}.forward", WAYS[way](functools.partial(function, plain)))
        return clone

    expected = [runs.run(given(runs.patcher, function)) for function in (constant, placed)]
    assert not torch.allclose(*expected, rtol=1e-3, atol=1e-4)
    blocks = "middle_block.*, output_blocks.0.*, output_blocks.1.*"  # as many as make a graph for each place too many
    compiled = runs.attach(runs.patcher, compile_when="in background", only_blocks=blocks)
    for index in (0, 1, 0):
        for _ in range(2):
            image = runs.run(given(compiled, (constant, placed)[index]))
            same(image, expected[index], "with the other forward")
            assert engine("background.thread").compiler.wait(120)
    assert all("reads what differs in each block or step" in failure for failure in runs.failures) and runs.graphs
