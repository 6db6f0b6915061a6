"""Keys by identity: of what lives, of what is gone, and of what cannot be referred to weakly."""

import gc


class Thing:
    pass


def test_equal_for_one_object_only(engine):
    same, one, other = engine("per_model").Same, Thing(), Thing()
    assert same(one) == same(one) and hash(same(one)) == hash(same(one))
    assert same(one) != same(other) and same(one) != one
    assert same(None) == same(None) and same(None) != same(one) and same(3) != same(one)
    assert same(len) == same(len) != same(max)


def test_not_equal_to_what_lies_at_its_address_later_and_does_not_keep_it_alive(engine):
    same = engine("per_model").Same
    for _ in range(100):
        thing = Thing()
        key, address = same(thing), id(thing)
        del thing
        gc.collect()
        later = Thing()
        if id(later) == address:
            break
    assert id(later) == address, "Python gave the address to no other; this proves nothing"
    assert hash(same(later)) == hash(key) and same(later) != key
