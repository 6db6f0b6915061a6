"""What a block reads of its options, however it does: filtered options give what all of them give."""

import copy

import pytest
from hypothesis import given
from reading_blocks import FOLLOWED, LOST, chain, load, many, numbers, option_dicts, run, ways


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


@pytest.mark.parametrize("way", FOLLOWED)
def test_what_can_be_followed_is_read_and_nothing_else(engine, folder, way):
    (block,) = load(folder, next(numbers), [(FOLLOWED[way], "total_blocks")])
    assert engine("options.filter").keys_read(block) == (set() if way == "nothing" else {"total_blocks"})


@pytest.mark.parametrize("statement", LOST.values(), ids=LOST)
def test_what_cannot_be_followed_may_read_anything(engine, folder, statement):
    (block,) = load(folder, next(numbers), [(statement, "total_blocks")])
    assert engine("options.filter").keys_read(block) == engine("options.filter").BOOKKEEPING


def test_a_file_that_was_updated_since_is_not_believed(engine, tmp_path):
    (block,) = load(tmp_path, 0, [(LOST["key in a variable"], "sigmas")])
    path = tmp_path / "reading_0_0.py"
    path.write_text(path.read_text().replace("transformer_options.get(NAME)", "0"))
    assert engine("options.filter").keys_read(block) == engine("options.filter").BOOKKEEPING


@many
@given(ways=ways, options=option_dicts)
def test_filtered_options_give_what_all_of_them_give(engine, folder, ways, options):
    block = chain(load(folder, next(numbers), ways))
    options = {"patches": {}, "patches_replace": {}, **options}
    filtered, patched = engine("options.filter").OptionsFilter(block)(copy.deepcopy(options))
    assert not patched and run(block, filtered) == run(block, options)
