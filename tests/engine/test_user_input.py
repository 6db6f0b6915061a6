"""Inputs of another kind than the node's: the error names the input, the value and what to use."""

import re
from types import SimpleNamespace

import pytest
import torch

NAN, INFINITE, TEXT = float("nan"), float("inf"), torch.zeros(1, 4, 8)
NO_SIZES = 0.5, "64", None, [64], NAN, INFINITE, torch.tensor(64.0)
NO_CONDITIONING = None, "text", 5, [5], ["ab"], [[TEXT]], [[TEXT, None]], [["text", {}]], [[TEXT, {}, 1]]
NO_LATENT = "x", TEXT, {}, {"samples": "x"}, {"samples": torch.zeros(5)}, {"samples": torch.zeros(0, 4, 8, 8)}


@pytest.fixture
def refused(engine):
    """refused(said, function, *args): the function raises InvalidSetting, which says so."""

    def refuses(said, function, *args, **kwargs):
        with pytest.raises(engine("errors").InvalidSetting, match=said):
            function(*args, **kwargs)

    return refuses


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cache_limit", [-1, 5000, 0.5, "4", NAN]),
        ("fullgraph", [{}, 2]),
        ("allow_tf32", [None]),
        ("cudnn_benchmark", [torch.zeros(2)]),
        ("only_blocks", [5, None]),
        ("backend", ["tvm", ["inductor"]]),
        ("mode", ["fast", {}]),
        ("dynamic", ["yes"]),
    ],
)
def test_a_setting_of_another_kind_is_named(engine, refused, name, values):
    for value in values:
        refused(rf"^{name} = {re.escape(repr(value))}.*: (use|choose)", engine("settings").CompileSettings, **{name: value})


def test_sizes_of_another_kind_are_named(engine, refused):
    sizes = engine("host.nodes.warmup_plan")
    for value in NO_SIZES:
        refused(r"^width = .+: use a whole number, 1 to 16384", sizes.Size, value, 64)
    for value in (None, {"samples": 1}, 5):
        refused(r"^extra_sizes = .+: use a text", sizes.parse_extra_sizes, value)


def test_what_cannot_be_sampled_is_named(engine, refused):
    given = engine("user_input")
    for value in NO_CONDITIONING:
        for name in ("positive", "negative"):
            sides = {"positive": [[TEXT, {}]], "negative": [[TEXT, {}]], name: value}
            refused(rf"^{name} = .+: connect a conditioning", given.check_sampling, **sides, cfg=1.0)
    for value in ("1", None, NAN, INFINITE, [1.0]):
        refused(r"^cfg = .+: use a number", given.check_sampling, [], [], value)
    for value in NO_LATENT:
        refused(r"^latent_image = .+: connect the latent", given.check_sampling, [], [], 1.0, value)
    for value in (None, "x", 5, SimpleNamespace(model=None)):
        refused(r"^model = .+: connect a diffusion model", given.check_model, value)
