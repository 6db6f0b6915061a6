"""Blocks are found by structure."""

import pytest
import torch
from support import Block, Net
from torch import nn


def paths(plan):
    return [block.path for block in plan.blocks]


def test_a_list_of_one_class(engine):
    plan = engine("blocks.discovery").find_blocks(Net())
    assert paths(plan) == ["blocks.0", "blocks.1", "blocks.2"]
    assert plan.summary() == "blocks.* (3 Block)"
    assert 0.5 < plan.covered_share < 1


def test_the_outermost_list_wins(engine):
    class Expert(Block):
        pass

    class Mixture(Block):
        def __init__(self, width=8):
            super().__init__(width)
            self.experts = nn.ModuleList(Expert(width) for _ in range(3))

    assert paths(engine("blocks.discovery").find_blocks(Net(Mixture))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_dict_of_blocks(engine):
    class Dicts(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleDict({f"block{i}": Block() for i in range(3)})

    assert paths(engine("blocks.discovery").find_blocks(Dicts())) == ["blocks.block0", "blocks.block1", "blocks.block2"]


def test_blocks_that_another_node_has_compiled_are_found(engine):
    """It leaves PyTorch's wrappers in the model until the host loads it again."""
    net = Net()
    plan = engine("blocks.discovery").find_blocks(net)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, backend="eager")
    assert engine("blocks.discovery").find_blocks(net) == plan


def test_blocks_inside_what_another_node_has_compiled_are_found(engine):
    """KJNodes' node for HunyuanVideo wraps `txt_in`, which holds a list of blocks; in a UNet it would be a transformer."""
    net, find_blocks = (
        nn.ModuleDict({"text": Net(), "image": Net(), "unet": unet_of_blocks()}),
        engine("blocks.discovery").find_blocks,
    )
    plan = find_blocks(net)
    net["text"] = torch.compile(net["text"], backend="eager")
    for level in net["unet"].input_blocks:
        level[1] = torch.compile(level[1], backend="eager")
    assert find_blocks(net) == plan


def test_blocks_inside_what_a_patch_puts_in_their_place(engine):
    """WaveSpeed's step cache: in the place of the first block stands a module that calls all of them."""

    class Cached(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.blocks = blocks

    binding, settings, net = engine("compile.binding"), engine("settings").CompileSettings(), Net()
    blocks = binding.blocks_of(net, settings)
    net.blocks = nn.ModuleList([Cached(net.blocks)])
    assert binding.blocks_of(net, settings) == blocks
    net.blocks[0] = alone = nn.Sequential(blocks[0])
    assert binding.blocks_of(net, settings) == [alone]


def unet_of_blocks():
    """Residual blocks beside transformers that hold block lists."""

    class Residual(Block):
        pass

    class Transformer(Block):
        def __init__(self, width=8, depth=2):
            super().__init__(width)
            self.transformer_blocks = nn.ModuleList(Block(width) for _ in range(depth))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_blocks = nn.ModuleList(nn.Sequential(Residual(), Transformer()) for _ in range(2))

    return UNet()


def test_mixed_lists_as_in_a_unet(engine):
    """The blocks in the transformers, and the residual blocks."""
    assert paths(engine("blocks.discovery").find_blocks(unet_of_blocks())) == [
        "input_blocks.0.0",
        "input_blocks.0.1.transformer_blocks.0",
        "input_blocks.0.1.transformer_blocks.1",
        "input_blocks.1.0",
        "input_blocks.1.1.transformer_blocks.0",
        "input_blocks.1.1.transformer_blocks.1",
    ]


def test_a_model_without_repetition_is_one_region(engine):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)

    plan = engine("blocks.discovery").find_blocks(Odd())
    assert plan.whole_model and paths(plan) == [""] and plan.covered_share == 1
    assert "whole model" in plan.summary()


def test_patterns_choose_blocks(engine):
    plan = engine("blocks.discovery").find_blocks(Net())
    assert paths(plan.select(("blocks.0", "blocks.2"))) == ["blocks.0", "blocks.2"]


def test_a_pattern_without_a_match_lists_the_blocks(engine):
    plan = engine("blocks.discovery").find_blocks(Net())
    with pytest.raises(engine("errors").InvalidSetting) as error:
        plan.select(("blocks.*", "layers.*"))
    assert "only_blocks = 'layers.*'" in str(error.value) and "blocks.* (3 Block)" in str(error.value)
