"""What other nodes change in a block, or under it, is seen when the block is called next."""

import ctypes
import enum
import functools
import types
import unittest.mock as mock

import numpy as np
import pytest
import torch
from support import Block
from torch import nn


def test_a_state_notices_layers_forwards_and_hooks(engine):
    block = Block()

    def state_of(block):
        return engine("blocks.state").BlockState(block, {})

    state = state_of(block)
    assert state.holds(block)
    layer = block.inner
    block.inner = nn.Linear(8, 8)
    assert not state.holds(block)
    block.inner = layer
    assert state.holds(block)
    layer.forward = layer.forward
    assert state.holds(block) and "forward" not in layer.__dict__, "its own forward is nothing new"
    layer.forward = lambda x: x
    assert not state.holds(block) and state_of(block).forwards
    del layer.forward
    hook = layer.register_forward_hook(lambda *_: None)
    assert not state.holds(block) and state_of(block).hooked == ("inner",)
    hook.remove()
    assert state.holds(block)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not state.holds(block) and state_of(block).hooked == ("all modules",)
    hook.remove()
    assert state.holds(block)


class Table:
    """No module."""

    def of(self, x):
        return x

    @classmethod
    def made(cls, x):
        return x

    @staticmethod
    def plain(x):
        return x

    @property
    def size(self):
        return 1

    @functools.cached_property
    def kept(self):
        return 1


class Holding(Block):
    def __init__(self, width=8):
        super().__init__(width)
        self.table, self.tables = Table(), {"in a list": [Table()]}

    @classmethod
    def made(cls, x):
        return x


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (Table, "of", lambda self, x: x),
        (Table, "made", classmethod(lambda cls, x: x)),
        (Table, "plain", staticmethod(lambda x: x)),
        (Table, "size", property(lambda self: 2)),
        (Table, "kept", functools.cached_property(lambda self: 2)),
        (Holding, "made", classmethod(lambda cls, x: x)),
        (Holding, "new", lambda self: 1),
        (nn.Module, "__call__", lambda self, *args: self.forward(*args)),
        (nn.Linear, "forward", lambda self, x: x),
    ],
)
def test_a_method_of_a_class_is_replaced(engine, cls, name, value):
    block = Holding()
    state = engine("blocks.state").BlockState(block, {})
    with mock.patch.object(cls, name, value, create=True):
        assert not state.holds(block)
        other = engine("blocks.state").BlockState(block, {})
        assert other.methods != state.methods and other.holds(block)
    assert engine("blocks.state").BlockState(block, {}).methods == state.methods


def test_a_method_that_is_made_anew_of_the_same_code_and_values_is_the_same(engine):
    def louder(factor):
        return lambda self, x: x * factor

    def key():
        return engine("blocks.state").BlockState(block, {}).methods

    block, keys = Block(), []
    for factor in (1.5, 1.5, 2.5):
        with mock.patch.object(Block, "forward", louder(torch.tensor(factor).item())):
            keys.append(key())
    assert keys[0] == keys[1] != keys[2] and key() not in keys


class Kind(str, enum.Enum):
    ONE = "one"


@pytest.mark.parametrize(
    "value",
    [(ctypes.c_uint * 4)(), Kind.ONE, np.float64(2), types.SimpleNamespace(a=1)],
    ids=["ctypes", "enum", "numpy", "plain"],
)
def test_a_block_may_hold_objects_of_classes_written_in_c(engine, value):
    """Some of these say no module. The host keeps arrays of `ctypes` on its layers under dynamic VRAM."""
    block = Block()
    block.scale = value
    state = engine("blocks.state").BlockState(block, {})
    assert state.holds(block)


def test_what_the_host_keeps_for_its_weights_is_no_part_of_a_block(engine):
    """Other objects in each run, and from the second step on others than in the first."""

    class LowVramPatch:
        def __call__(self, weight):
            return weight

    state, block = engine("blocks.state").BlockState, Block()
    layer = next(module for module in block.modules() if isinstance(module, nn.Linear))
    layer.weight_function, layer.weight_lowvram_function, layer._v_signature = [], None, None
    before = state(block, {})
    layer.weight_function = [LowVramPatch()]
    layer.weight_lowvram_function, layer._v_signature = LowVramPatch(), (ctypes.c_uint * 4)()
    assert before.holds(block) and state(block, {}).methods == before.methods
