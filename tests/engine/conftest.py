"""Tests of the engine without the host: plain PyTorch models, no ComfyUI in the process."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_host(request):
    """A test that loads ComfyUI must say so: the seconds that takes are what the others are spared."""
    before = "comfy.model_management" in sys.modules
    yield
    loaded = "comfy.model_management" in sys.modules
    assert before or not loaded or request.node.get_closest_marker("host"), "loads ComfyUI: mark it `host`"
