"""Tensors of a block that are given other data after code was made: the tensor stays the same object."""

import itertools

import pytest
import torch
from support import Block, CompiledNet, Net
from torch import nn

pytestmark = pytest.mark.usefixtures("inference_mode")


class Holding(Block):
    """A block of a size of its own: of blocks that share code, each call finds other dicts than the one before."""

    def __init__(self, width, numbers=itertools.count(8)):  # noqa: B008  for all blocks
        super().__init__(width)
        hidden = next(numbers)
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.square = nn.Parameter(torch.randn(width, width))
        self.register_buffer("offset", torch.randn(width, width))
        self.factor = torch.randn(width, width)

    def forward(self, x):
        return super().forward(x) @ self.factor @ self.square + self.offset.sum(0)


@pytest.mark.parametrize("name", ["square", "offset", "factor"])
@pytest.mark.parametrize("at_once", [False, True])
def test_other_strides_take_another_graph(engine, at_once, name):
    """Code reads memory by the strides that it was made for."""
    net, x = Net(Holding), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    for graphs in (3, 6, 6):
        for _ in range(3):  # PyTorch looks for another dict from the second call on
            assert torch.equal(step.call(at_once, x), net(x)) and not step.failures
        assert step.graphs == graphs
        for block in net.blocks:
            tensor = getattr(block, name)
            tensor.data = tensor.data.t()
