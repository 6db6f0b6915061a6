"""What the engine asks of Python's threads."""

import sys

import pytest
from frames import CALLS, most_pages


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info < (3, 11), reason="another Python keeps frames elsewhere")
def test_frames_in_one_piece_cost_no_memory_at_any_depth(engine):
    assert most_pages() >= CALLS, "this Python shows no difference"
    assert engine("threads").in_one_piece(most_pages) < CALLS / 10


def test_a_call_in_one_piece_is_that_call(engine):
    in_one_piece = engine("threads").in_one_piece
    assert in_one_piece(sorted, [1, 2], reverse=True) == [2, 1]
    with pytest.raises(ValueError, match="two"):
        in_one_piece(int, "two")
