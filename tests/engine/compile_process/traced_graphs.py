"""Graphs as Dynamo hands them to a backend, and what is written down of them.

As a script: the key of one graph and what is in it, made in a process of its own.
"""

import enum
import importlib
import json
import sys
import types
from collections import namedtuple
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[3]


Pair = namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1


class Name(str, enum.Enum):
    SHORT = "s"


def keep(x, *_values, **_named):
    """A function of a graph that takes whatever there is."""
    return x


def loaded(name):
    """A module of the engine, in the script."""
    if "kit" not in sys.modules:
        sys.modules["kit"] = package = types.ModuleType("kit")
        package.__path__ = [str(ROOT)]
    return importlib.import_module(f"kit.engine.{name}")


def traced(engine, function, *args, use, dynamic=None, inference=True):
    """What `use(graph, fakes)` returns, called while Dynamo traces `function`, for each of its graphs."""
    results, fakes_of = [], engine("compile.traced_graph").fakes_of
    session = engine("compile.session")

    def backend(graph, inputs):
        results.append(use(graph, fakes_of(graph, inputs)))
        return graph.forward

    torch._dynamo.reset()
    with (
        torch.inference_mode(inference),
        engine("torch_settings").compile_scope.applied(**session.COMPILE_SWITCHES),
        session.tracing_scope.applied(**session.TRACING),
    ):
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return results


def request(engine, function, *args, options=None, dynamic=None, inference=True):
    """The request for the only graph of a function."""

    def use(graph, fakes):
        return engine("compile_process.obtain").request_for(graph, fakes, options or {}, torch.device("cpu"))

    (made,) = traced(engine, function, *args, use=use, dynamic=dynamic, inference=inference)
    return made


class Attention(nn.Module):
    """What a block's graph is made of: sizes that vary, a kernel that is chosen, slices, views, a cast."""

    def __init__(self, width=16):
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.requires_grad_(False)

    def forward(self, x, context):
        q, k = self.q(self.norm(x)), self.k(context)
        q, k = (t.view(*t.shape[:-1], 2, -1).transpose(1, 2) for t in (q, k))
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            y = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        y = y.transpose(1, 2).flatten(2)
        return x + y[..., :16].to(torch.float64).to(x.dtype) * 0.3, context[:, None].sum((1,), keepdim=True)


def attention(engine, size=(2, 6, 3)):
    batch, length, other = size
    torch.manual_seed(0)
    block = Attention()
    inputs = torch.randn(batch, length, 16), torch.randn(batch, other, 16)
    return request(engine, block, *inputs, dynamic=True)


def key_of_attention(engine, size=(2, 6, 3)):
    return attention(engine, size).key


def what_is_named(engine):
    """The key of `attention`, and what is in it."""
    made = attention(engine)
    return {"key": made.key, "request": json.loads(made.text), "environment": engine("cache.environment").environment()}


if __name__ == "__main__":
    print(json.dumps(what_is_named(loaded)))
