"""Each kind of code of another pack that comes and goes while compiled code is there: what happens with it. None is stale.

`SEEN`: blocks are compiled with it, and without it. `EAGER`: blocks run uncompiled while it is there. `OUTSIDE`: it is called
between two graphs.
"""

import functools
import types
import unittest.mock as mock
from contextlib import contextmanager

import pytest
import torch
from patch_kinds import options
from patching import Runs, patched, same
from support import wait_until_compiled
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

SEEN, EAGER, OUTSIDE = "seen", "eager", "outside"


def louder(result):
    return tuple(t * 1.5 for t in result) if isinstance(result, tuple) else result * 1.5


def around(function):
    return lambda *args, **kwargs: louder(function(*args, **kwargs))


def method(cls, name):
    return lambda _network: mock.patch.object(cls(_network), name, around(getattr(cls(_network), name)))


def first(network):
    return network.single_blocks[0]


@contextmanager
def hook(network):
    handle = first(network).linear1.register_forward_hook(lambda _module, _args, out: louder(out))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def pre_hook(network):
    handle = first(network).linear1.register_forward_pre_hook(lambda _module, args: louder(args))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def global_hook(network):
    layers = {first(network).linear1}
    handle = nn.modules.module.register_module_forward_hook(lambda m, _args, out: louder(out) if m in layers else None)
    try:
        yield
    finally:
        handle.remove()


def module_call(network):
    layers, own = {first(network).linear1}, nn.Module.__call__

    def call(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        return louder(out) if self in layers else out

    return mock.patch.object(nn.Module, "__call__", call)


@contextmanager
def instance(network):
    layer = first(network).linear2
    layer.forward = around(layer.forward)
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def exchanged_layer(network):
    class Louder(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, x):
            return louder(self.own(x))

    block = first(network)
    own, block.linear1 = block.linear1, Louder(block.linear1)
    try:
        yield
    finally:
        block.linear1 = own


@contextmanager
def exchanged_class(network):
    norm = first(network).norm
    own = type(norm)
    norm.__class__ = type("Louder", (own,), {"forward": lambda self, *args: louder(own.forward(self, *args))})
    try:
        yield
    finally:
        norm.__class__ = own


def module_function(network):
    from comfy.ldm.flux import layers

    def by_step(*args, transformer_options, attention=layers.attention, **kwargs):
        out = attention(*args, transformer_options=transformer_options, **kwargs)
        return out * (1 + float(transformer_options["sigmas"][0]))

    return mock.patch.object(layers, "attention", by_step)


class Table:
    """An object of another pack that a block holds; its methods are not the block's."""

    factor = 1.0

    def of(self, x):
        return x * self.factor

    @classmethod
    def made(cls, x):
        return x * 1.0


@contextmanager
def holds(network):
    """Before all runs: a block asks objects, as blocks of other packs do."""
    block = first(network)
    block.linear1.table = Table()
    own = block.linear1.forward

    def forward(self, x):
        return self.table.made(self.table.of(own(x)))

    block.linear1.forward = types.MethodType(forward, block.linear1)
    try:
        yield
    finally:
        del block.linear1.table, block.linear1.forward


WRAPPED = {
    "hook": (hook, EAGER),
    "pre-hook": (pre_hook, EAGER),
    "hook of all modules": (global_hook, EAGER),
    "Module.__call__": (module_call, SEEN),
    "forward of a layer": (instance, SEEN),
    "forward of a layer's class": (method(lambda n: type(first(n).norm), "forward"), SEEN),
    "forward of the block's class": (method(lambda n: type(first(n)), "forward"), SEEN),
    "layer": (exchanged_layer, SEEN),
    "class of a layer": (exchanged_class, SEEN),
    "function of a Python module": (module_function, SEEN),
    "method of an object": (method(lambda _n: Table, "of"), SEEN),
    "class method of an object's class": (
        lambda _n: mock.patch.object(Table, "made", classmethod(lambda cls, x: x * 1.5)),
        SEEN,
    ),
    "attribute of an object's class": (lambda _n: mock.patch.object(Table, "factor", 1.5), SEEN),
}


class Late:
    """Around the model, as another pack's wrapper: `change` holds during each call in the second half of the run."""

    def __init__(self, change):
        self.change = change

    def __call__(self, executor, x, timestep, *args, **kwargs):
        network = executor.class_obj
        if float(timestep.max()) > 0.6:
            return executor(x, timestep, *args, **kwargs)
        with self.change(network):
            return executor(x, timestep, *args, **kwargs)


def wrapped(change):
    from comfy.patcher_extension import WrappersMP

    return lambda m: m.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "another pack", Late(change))


# What is seen of a change does not depend on whether code is waited for: both ways with one that is seen, and one that is not.
AT_ONCE = [(name, "before first image") for name in ("hook", "forward of a layer")]


@pytest.mark.parametrize(("name", "mode"), [*((name, "in background") for name in WRAPPED), *AT_ONCE])
def test_what_a_wrapper_changes_during_a_call(tiny, engine, name, mode):
    change, how = WRAPPED[name]
    flux = Runs(tiny, engine, "flux", cfg=1.0, steps=4)
    with holds(flux.patcher.model.diffusion_model):
        plain, expected = flux.run(flux.patcher), flux.run(patched(flux.patcher, wrapped(change)))
        assert not torch.allclose(plain, expected, rtol=1e-3), "it does nothing; this proves nothing"
        compiled = flux.attach(flux.patcher, compile_when=mode, only_blocks="single_blocks.*")
        for changes in (False, True, True, False):
            patcher = patched(compiled, wrapped(change)) if changes else compiled
            same(flux.run(patcher), expected if changes else plain, changes)
            wait_until_compiled(engine)
    assert bool(flux.failures) == (how is EAGER), flux.failures


PATCHES = {
    "patch in a list": options.patched_with(options.by_place, "attn1_output_patch"),
    "object that keeps state": lambda m: m.set_model_attn1_output_patch(options.Relabelled()),
    "partial": options.patched_with(functools.partial(options.scaled_by, factor=1.6), "attn1_output_patch"),
    "attention override": options.overridden(options.by_place_of_attention),
    "override that keeps state": lambda m: options.overridden(options.Sparse())(m),
}


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "in background") for name in PATCHES), ("patch in a list", "before first image")]
)
def test_what_is_in_the_options(tiny, engine, name, mode):
    patch = PATCHES[name]
    flux = Runs(tiny, engine, "flux", cfg=1.0, steps=3)
    plain, expected = flux.plain(), flux.run(patched(flux.patcher, patch))
    assert not torch.allclose(plain, expected, rtol=1e-3), "it does nothing; this proves nothing"
    compiled, graphs = flux.attach(flux.patcher, compile_when=mode, only_blocks="single_blocks.*"), []
    for patches in (False, True, False, True):
        same(flux.run(patched(compiled, patch) if patches else compiled), expected if patches else plain, patches)
        wait_until_compiled(engine)
        graphs.append(flux.graphs)
    assert graphs[2] == graphs[3], f"{OUTSIDE}: no graph knows it, so that another one needs none"
    assert not flux.failures
