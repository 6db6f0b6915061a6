"""transformer_options: what reaches a block."""

import copy

import pytest
import torch
from hypothesis import given
from reading_blocks import chain, load, many, numbers, option_dicts, run, ways
from support import Block, CompiledNet, Net
from torch import nn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


class Reader(nn.Module):
    """Depends on where it stands."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        return x * transformer_options.get("block_index", 0)


class Both(Block):
    """Looks a replacement up by its place, and has a strength of its own there."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        place = transformer_options.get("block_index", 0)
        replace = transformer_options.get("patches_replace", {}).get("attn1", {})
        x = replace[place](x) if place in replace else super().forward(x)
        return x * (1 + place)


class InATableOfItsOwn(Block):
    def forward(self, x, transformer_options={}):  # noqa: B006
        place = transformer_options["block_index"]
        if place in transformer_options.get("patches_replace", {}).get("attn1", {}):
            return x
        return super().forward(x) * [1.0, 2.0, 3.0][place]


class NextToAPatch(Block):
    """As ldm/krea2/model.py: patches run where the model says which block it is."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        if "block_index" in transformer_options and "attn1_patch" in transformer_options.get("patches", {}):
            for patch in transformer_options["patches"]["attn1_patch"]:
                x = patch(x)
        return super().forward(x)


class Handing(Both):
    def forward(self, x, transformer_options={}):  # noqa: B006
        return self.scaled(x, transformer_options["block_index"]) + len(transformer_options.get("patches_replace", {}))

    def scaled(self, x, place):
        return x * (1 + place)


class Writer(nn.Module):
    def forward(self, x, transformer_options={}):  # noqa: B006
        transformer_options["block_index"] = 7
        return x


def test_blocks_of_other_packs_may_read_anything(engine):
    options_filter = engine("transformer_options.filter")
    for block in (Block(), Reader(), Writer()):
        assert options_filter.keys_read(block) == options_filter.BOOKKEEPING


@pytest.mark.host
@many
@given(ways=ways, options=option_dicts)
def test_filtered_options_give_what_all_of_them_give(engine, folder, ways, options):
    block = chain(load(folder, next(numbers), ways))
    options = {"patches": {}, "patches_replace": {}, **options}
    filtered, patched = engine("transformer_options.filter").OptionsFilter(block)(copy.deepcopy(options))
    assert not patched and run(block, filtered) == run(block, options)


@pytest.mark.parametrize("block", [Both, InATableOfItsOwn, NextToAPatch, Handing])
@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_block_that_also_looks_up_a_patch_is_told_its_place(engine, inference_mode, block, at_once):
    net, x = Net(block), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net)
    for patches in ({}, {"patches": {"attn1_patch": [lambda x: x * 2]}}, {"patches_replace": {"attn1": {1: lambda x: x * 3}}}):
        expected = net(x, transformer_options=dict(patches))
        step.new_run()
        assert torch.equal(step.call(at_once, x, transformer_options=dict(patches)), expected)
        result, eager = step(x, transformer_options=dict(patches))
        assert torch.equal(result, expected) and not eager
    assert not step.failures


def test_patches_are_wrapped_and_named(engine):
    """Of a pack's block, which gets all that the host's dict holds; without patches the dict itself."""
    options = {"sigmas": 1, "patches": {"attn1_patch": [print]}}
    options_filter = engine("transformer_options.filter").OptionsFilter(Block())
    given, patched = options_filter(options)
    assert patched == ["attn1_patch builtins.print"] and given["sigmas"] == 1
    (patch,) = given["patches"]["attn1_patch"]
    assert type(patch) is engine("transformer_options.outside").Patch and options["patches"] == {"attn1_patch": [print]}
    plain = {"sigmas": 1, "patches": {"attn1_patch": []}}
    assert options_filter(plain) == (plain, []) and options_filter(plain)[0] is plain


def test_a_packs_own_kind_of_replacement_need_be_no_dict(engine):
    tables = {"of a pack": [print], "one function": len, "attn1": {4: print}}
    given, names = engine("transformer_options.filter").OptionsFilter(Block())({"patches_replace": tables})
    assert names == ["of a pack builtins.print", "one function builtins.len", "attn1 builtins.print"]
    assert given["patches_replace"]["one function"]([1, 2]) == 2


@pytest.mark.host
def test_patches_and_place_as_a_block_of_the_host_gets_them(engine):
    from comfy.ldm.modules.attention import BasicTransformerBlock

    options = {
        "block": ("input", 4),
        "block_index": 3,
        "sigmas": 1,
        "patches": {"output_block_patch": [print], "attn1_output_patch": [print]},
        "patches_replace": {"attn1": {("input", 4): len, ("input", 5): print}, "dit": {("double_block", 0): print}},
    }
    filtered = engine("transformer_options.filter").OptionsFilter(BasicTransformerBlock(8, 1, 8))
    given, names = filtered(options)
    assert names == ["attn1_output_patch builtins.print", "attn1 builtins.len"]
    assert set(given) == {"patches", "patches_replace", "block", engine("transformer_options.outside").HOLDER}
    assert list(given["patches"]) == ["attn1_output_patch"] and given["block"] == ("block", 0)
    assert list(given["patches_replace"]) == ["attn1"] and list(given["patches_replace"]["attn1"]) == [("block", 0)]
    options["patches"] = {"output_block_patch": [print]}
    given, names = filtered({**options, "block": ("input", 7)})
    assert not names and given == {"patches": {}, "patches_replace": {}}


def test_what_a_block_leaves_for_others_goes_back(engine):
    options = {"sigmas": 1, "kept": 2}
    given = {"kept": 2, "left": 3, "patches": {}, "patches_replace": {}}
    engine("transformer_options.filter").OptionsFilter.write_back(options, given)
    assert options == {"sigmas": 1, "kept": 2, "left": 3}
