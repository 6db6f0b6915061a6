"""Inputs as the host makes them pass the checks of a node's inputs."""

import pytest
import torch

pytestmark = pytest.mark.host


def test_what_the_host_makes_passes(engine, tiny):
    from comfy.nested_tensor import NestedTensor

    given, text = engine("user_input"), torch.zeros(1, 4, 8)
    given.check_model(tiny.build_patcher("flux"))
    positive, negative = tiny.conditioning("flux")
    for latent in (None, {"samples": tiny.empty_latent("wan")}, {"samples": NestedTensor([text, text])}):
        given.check_sampling(positive, [(None, {})], 1, latent)
        given.check_sampling([], negative, 0.0, latent)
