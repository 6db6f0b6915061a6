"""What of a UNet is compiled when the whole model is replayed from CUDA graphs."""

from collections import Counter

import pytest
import torch
from support import Block, CompiledNet, compile_settings, eager_blocks

pytestmark = pytest.mark.usefixtures("inference_mode")


class ConvolutionBlock(torch.nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = torch.nn.GroupNorm(2, width)
        self.convolution = torch.nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.convolution(torch.nn.functional.silu(self.norm(x)))


class UNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.residual = torch.nn.ModuleList(ConvolutionBlock() for _ in range(3))
        self.transformers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for residual, transformer in zip(self.residual, self.transformers, strict=True):
            x = residual(x)
            x = transformer(x.flatten(2).transpose(1, 2).contiguous()).transpose(1, 2).reshape(x.shape)
        return x


@pytest.mark.parametrize(("tuned", "hooked", "groups"), [(False, False, 1), (True, False, 2), (False, True, 1)])
def test_convolutions_stay_eager_unless_kernels_are_to_be_tuned(engine, tuned, hooked, groups):
    net, x = UNet().requires_grad_(False), torch.randn(1, 8, 4, 4)
    if hooked:
        net.residual[0].register_forward_hook(lambda *_: None)
    settings = compile_settings(engine, mode="max-autotune" if tuned else "auto")
    expected = net(x)
    binding = engine("compile.binding").Binding(net, settings)
    with engine("compile.session").watching, binding.bound():
        assert torch.equal(net(x), expected)
    code = engine("compile.registry").code_of(net)
    assert binding.plain is not hooked and len(code.groups) == groups
    assert eager_blocks(code) == ({"CONVOLUTIONS": {"ConvolutionBlock": 3}} if groups == 1 else {})


class ImageTransformer(torch.nn.Module):
    """As SD 1.5's: tokens are made, and made an image again, around transformers of which each block holds one."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.GroupNorm(2, width)
        self.blocks = torch.nn.ModuleList([Block(width)])

    def forward(self, x):
        tokens = self.norm(x).flatten(2).transpose(1, 2).contiguous()
        for block in self.blocks:
            tokens = block(tokens)
        return x + tokens.transpose(1, 2).reshape(x.shape)


class SmallUNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.residual = torch.nn.ModuleList(ConvolutionBlock(16) for _ in range(2))
        self.levels = torch.nn.ModuleList(torch.nn.Sequential(ImageTransformer(w), ImageTransformer(w)) for w in (16, 32))

    def forward(self, x):
        x = self.levels[0](self.residual[1](self.residual[0](x)))
        half = self.levels[1](torch.nn.functional.avg_pool2d(x, 4).repeat(1, 2, 1, 1))
        return x + torch.nn.functional.interpolate(half[:, :16], scale_factor=4.0)


def test_in_a_unet_only_large_transformers_are_compiled(engine):
    net, x = SmallUNet().requires_grad_(False), torch.randn(1, 16, 16, 16)
    assert torch.equal(CompiledNet(engine, net).at_once(x), net(x))
    code = engine("compile.registry").code_of(net)
    graphs = {group.class_name: group.stats.graphs for group in code.groups.values() if group.stats.graphs}
    assert graphs == {"Block": 1} and dict(code.parts) == {"Block": 4}
    assert eager_blocks(code) == {"CONVOLUTIONS": {"ConvolutionBlock": 2}, "SMALL": {"Block": 2}}


@pytest.mark.parametrize("mode", ["auto", "max-autotune"])
def test_a_part_with_another_nodes_forward_is_left_out(engine, mode):
    """Its block was compiled in one piece, with that node's code inside."""
    net, x = SmallUNet().requires_grad_(False), torch.randn(1, 16, 16, 16)
    part, seen = net.levels[0][0].blocks[0], []

    def forward(tokens):
        seen.append(torch.compiler.is_compiling())
        return tokens + 1

    part.forward = forward
    expected = net(x)
    assert torch.equal(CompiledNet(engine, net, mode=mode).at_once(x), expected)
    code = engine("compile.registry").code_of(net)
    assert seen == [False] * 2 and dict(code.parts) == ({"Block": 3} if mode == "auto" else {})
    assert [taken.message().partition(" by ")[0] for taken in code.taken] == [
        "1 Block run uncompiled: another node has replaced their forward"
    ]


def test_another_size_compiles_no_other_kinds(engine):
    net = SmallUNet().requires_grad_(False)
    graphs = []
    for side in (16, 32, 64):
        x = torch.randn(1, 16, side, side)
        assert torch.equal(CompiledNet(engine, net).at_once(x), net(x))
        groups = engine("compile.registry").code_of(net).groups.values()
        graphs.append([group.stats.graphs for group in groups if group.stats.graphs])
    assert graphs == [[1]] * 3


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.residual = torch.nn.ModuleList(ConvolutionBlock(8) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x):
        for block in self.residual:
            x = block(x)
        return x


def test_a_model_of_nothing_but_convolutions_is_compiled(engine):
    net, x = Convolutions(), torch.randn(1, 8, 4, 4)
    CompiledNet(engine, net).at_once(x)
    code = engine("compile.registry").code_of(net)
    assert len(code.groups) == 1 and not eager_blocks(code)


def test_a_part_that_somebody_took_away_leaves_its_block_whole(engine):
    net = SmallUNet().requires_grad_(False)
    parts_of = engine("blocks.convolutions").parts_of
    block = net.levels[0][0]
    assert parts_of(block) == [block.blocks[0]]
    del block.blocks[0]
    assert parts_of(block) == []


@pytest.mark.parametrize(
    ("elements", "few"), [((100, 100), [False, False]), ((100, 30), [False, True]), ((30, 100), [False, False])]
)
def test_what_is_small_is_small_beside_the_largest_so_far(engine, elements, few):
    kinds, another = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)], torch.nn.Linear(1, 3)
    convolutions = engine("blocks.convolutions")
    effort = convolutions.Effort(Counter(map(convolutions.kind_of, [*kinds, another])))
    for _ in range(2):  # what is decided stays, also when the call runs again
        found = [effort.is_too_small(block, (None, torch.zeros(n))) for block, n in zip(kinds, elements, strict=True)]
        assert found == few
    assert list(effort.left_out.values()) == ["Linear"] * any(few)
    assert not effort.is_too_small(another, ())  # without a tensor there is nothing to judge by
