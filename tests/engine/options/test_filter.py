"""transformer_options: what reaches a block."""

from support import Block
from torch import nn


class Reader(nn.Module):
    """Depends on where it stands."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        return x * transformer_options.get("block_index", 0)


class Looker(nn.Module):
    """Uses its place only to find a replacement, as the host's transformer blocks do."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        place = transformer_options.get("block_index", 0)
        replace = transformer_options.get("patches_replace", {})
        return replace[place](x) if place in replace else x


class Writer(nn.Module):
    def forward(self, x, transformer_options={}):  # noqa: B006
        transformer_options["block_index"] = 7
        return x


def test_what_a_block_reads_is_kept(engine):
    keys_read = engine("options.filter").keys_read
    assert keys_read(Reader()) == {"block_index"}
    assert keys_read(Looker()) == frozenset()
    assert keys_read(Writer()) == frozenset()
    assert keys_read(nn.Sequential(Block(), Reader())) == {"block_index"}


def test_bookkeeping_is_dropped_and_the_rest_stays(engine):
    filtered, patched = engine("options.filter").OptionsFilter(Block())(
        {"sigmas": 1, "uuids": [2], "block_index": 3, "patches": {"attn1_patch": []}, "rope_options": {"scale": 2}}
    )
    assert not patched
    assert filtered == {"rope_options": {"scale": 2}, "patches": {}, "patches_replace": {}}


def test_with_a_patch_the_block_sees_everything(engine):
    options = {"sigmas": 1, "patches": {"attn1_patch": [print]}}
    filtered, patched = engine("options.filter").OptionsFilter(Block())(options)
    assert patched and filtered is options


def test_replacements_around_the_block_do_not_count(engine):
    options = {"block_index": 1, "patches_replace": {"dit": {("double_block", 0): print}}}
    _, patched = engine("options.filter").OptionsFilter(Block())(options)
    assert not patched


def test_what_a_block_leaves_for_others_goes_back(engine):
    options = {"sigmas": 1, "kept": 2}
    given = {"kept": 2, "left": 3, "patches": {}, "patches_replace": {}}
    engine("options.filter").OptionsFilter.write_back(options, given)
    assert options == {"sigmas": 1, "kept": 2, "left": 3}


def test_our_own_forwards_of_blocks_read_nothing_more(engine):
    """A model that a trainer, or the host for another GPU, has copied has them in its blocks; CUDA graphs ask for its keys."""
    filter_, own_forward = engine("options.filter"), engine("forwards").OwnForward
    net = nn.Sequential(Block(), Reader())
    expected = filter_.keys_read(net)
    for block in net:
        block.__dict__["forward"] = own_forward(type(block).forward, block)
    assert filter_.keys_read(net) == expected != filter_.BOOKKEEPING
