"""What a model reads of its options, however it does, is part of a graph's key."""

import pytest
from hypothesis import given
from hypothesis import strategies as some
from reading_blocks import KEYS, chain, load, many, numbers, option_dicts, run, ways

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


@many
@given(ways=ways, one=option_dicts, other=option_dicts, same=some.sets(some.sampled_from(KEYS)))
def test_options_that_a_model_can_tell_apart_share_no_graph(engine, folder, ways, one, other, same):
    graphing, keys = engine("host.graphs.replay"), engine("cuda_graphs.keys")
    network = chain(load(folder, next(numbers), ways))
    graphing.state_of(network).keys = engine("transformer_options.filter").keys_read(network)
    other = {**one, **{name: value for name, value in other.items() if name not in same}}
    one, other = ({"patches": {}, "patches_replace": {}, **options} for options in (one, other))
    if keys.value_key(graphing.kept_options(network, one)) == keys.value_key(graphing.kept_options(network, other)):
        assert run(network, one) == run(network, other)
