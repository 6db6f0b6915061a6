"""A model whose calls are replayed as on a GPU."""

import pytest
from capturing import capture_again
from patching import Runs


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    """A tiny Flux whose calls go through the decisions of `graphed`; what is captured runs the model again."""
    capture_again(engine, monkeypatch)
    return Runs(tiny, engine, "flux", cfg=1.0, steps=3, only="single_blocks.*")  # one kind is enough
