"""What a block reads of its options, however it does: filtered options give what all of them give, and so do graphs."""

import copy
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from reading_blocks import FOLLOWED, LOST, chain, load

KEYS = ["sigmas", "cond_or_uncond", "uuids", "block_index", "total_blocks", "img_slice", "easycache"]
numbers = itertools.count()


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


values = some.recursive(
    some.none() | some.booleans() | some.integers(-2, 2) | some.sampled_from([0.0, -0.0, 1.5, "", "a"]),
    lambda inner: some.lists(inner, max_size=2) | some.dictionaries(some.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
option_dicts = some.dictionaries(some.sampled_from([*KEYS, "rope_options", "more"]), values)
ways = some.lists(
    some.tuples(some.sampled_from([*FOLLOWED.values(), *LOST.values()]), some.sampled_from([*KEYS, "rope_options"])),
    min_size=1,
    max_size=3,
)
many = settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def run(block, options):
    return repr(block(1, transformer_options=copy.deepcopy(dict(options))))


@many
@given(ways=ways, options=option_dicts)
def test_filtered_options_give_what_all_of_them_give(engine, folder, ways, options):
    block = chain(load(folder, next(numbers), ways))
    options = {"patches": {}, "patches_replace": {}, **options}
    filtered, patched = engine("options.filter").OptionsFilter(block)(copy.deepcopy(options))
    assert not patched and run(block, filtered) == run(block, options)


@pytest.mark.host
@many
@given(ways=ways, one=option_dicts, other=option_dicts, same=some.sets(some.sampled_from(KEYS)))
def test_options_that_a_model_can_tell_apart_share_no_graph(engine, folder, ways, one, other, same):
    graphing, keys = engine("host.graphs.replay"), engine("cuda_graphs.keys")
    network = chain(load(folder, next(numbers), ways))
    graphing.read_of(network).look(network, [])
    other = {**one, **{name: value for name, value in other.items() if name not in same}}
    one, other = ({"patches": {}, "patches_replace": {}, **options} for options in (one, other))
    if keys.value_key(graphing.kept_options(network, one)) == keys.value_key(graphing.kept_options(network, other)):
        assert run(network, one) == run(network, other)
