"""Inputs of another kind than the node's: the error names the input, the value and what to use."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def given(engine):
    return engine("user_input")


@pytest.fixture
def invalid(engine):
    return engine("errors").InvalidSetting


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "tvm"),
        ("mode", "fast"),
        ("dynamic", "yes"),
        ("cache_limit", -1),
        ("cache_limit", 5000),
        ("cache_limit", 0.5),
        ("cache_limit", "4"),
        ("cache_limit", float("nan")),
        ("fullgraph", {}),
        ("fullgraph", 2),
        ("allow_tf32", None),
        ("cudnn_benchmark", torch.zeros(2)),
        ("only_blocks", 5),
        ("only_blocks", None),
        ("backend", ["inductor"]),
        ("mode", {}),
    ],
)
def test_a_setting_of_another_kind_is_named(engine, invalid, name, value):
    with pytest.raises(invalid, match=rf"^{name} = .+: (use|choose)") as error:
        engine("settings").CompileSettings(**{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [0.5, "64", None, [64], float("nan"), float("inf"), torch.tensor(64.0)])
def test_a_size_of_another_kind_is_named(engine, invalid, value):
    with pytest.raises(invalid, match=r"^width = .+: use a whole number, 1 to 16384"):
        engine("host.nodes.warmup_plan").Size(value, 64)


@pytest.mark.parametrize("value", [None, {"samples": 1}, 5])
def test_sizes_that_are_no_text_are_named(engine, invalid, value):
    with pytest.raises(invalid, match=r"^extra_sizes = .+: use a text"):
        engine("host.nodes.warmup_plan").parse_extra_sizes(value)


TEXT = torch.zeros(1, 4, 8)


@pytest.mark.parametrize("value", [None, "text", 5, [5], ["ab"], [[TEXT]], [[TEXT, None]], [["text", {}]], [[TEXT, {}, 1]]])
def test_no_conditioning_is_named(given, invalid, value):
    for name in ("positive", "negative"):
        sides = {"positive": [[TEXT, {}]], "negative": [[TEXT, {}]], name: value}
        with pytest.raises(invalid, match=rf"^{name} = .+: connect a conditioning"):
            given.check_sampling(**sides, cfg=1.0)


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), [1.0]])
def test_no_cfg_is_named(given, invalid, value):
    with pytest.raises(invalid, match=r"^cfg = .+: use a number"):
        given.check_sampling([], [], value)


@pytest.mark.parametrize(
    "value", ["x", TEXT, {}, {"samples": "x"}, {"samples": torch.zeros(5)}, {"samples": torch.zeros(0, 4, 8, 8)}]
)
def test_no_latent_is_named(given, invalid, value):
    with pytest.raises(invalid, match=r"^latent_image = .+: connect the latent"):
        given.check_sampling([], [], 1.0, value)


@pytest.mark.parametrize("value", [None, "x", 5, SimpleNamespace(model=None)])
def test_no_model_is_named(given, invalid, value):
    with pytest.raises(invalid, match=r"^model = .+: connect a diffusion model"):
        given.check_model(value)
