"""Settings and sizes: what is accepted, and what the errors say."""

import pytest
import torch


@pytest.fixture
def settings(engine):
    return engine("settings")


def test_defaults_are_the_documented_ones(settings):
    chosen = settings.CompileSettings()
    assert (chosen.backend, chosen.mode, chosen.dynamic, chosen.fullgraph) == ("inductor", "default", "auto", False)
    assert (chosen.cache_limit, chosen.block_swap, chosen.attention) == (0, "auto", "auto")
    assert (chosen.on_failure, chosen.allow_tf32, chosen.cudnn_benchmark) == ("run eager", False, False)
    assert chosen.only_blocks == ""


def test_equal_settings_are_one_value(settings):
    assert settings.CompileSettings() == settings.CompileSettings()
    assert len({settings.CompileSettings(), settings.CompileSettings()}) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("backend", "tvm"), ("mode", "fast"), ("dynamic", "yes"), ("cache_limit", -1), ("cache_limit", 5000)],
)
def test_bad_values_are_named(settings, engine, name, value):
    with pytest.raises(engine("errors").InvalidSetting) as error:
        settings.CompileSettings(**{name: value})
    assert name in str(error.value) and repr(value) in str(error.value)


def test_mode_needs_inductor(settings, engine):
    with pytest.raises(engine("errors").InvalidSetting, match=r"mode = 'max-autotune'.*inductor"):
        settings.CompileSettings(backend="eager", mode="max-autotune")


def test_options_are_fresh_and_expand_the_mode(settings):
    chosen = settings.CompileSettings(mode="max-autotune-no-cudagraphs")
    assert chosen.inductor_options()["max_autotune"] is True
    assert chosen.inductor_options() is not chosen.inductor_options()


def test_a_backend_that_is_not_installed_is_named(settings, engine, monkeypatch):
    monkeypatch.setattr("torch._dynamo.list_backends", lambda _tags: ["eager"])
    with pytest.raises(engine("errors").InvalidSetting, match=r"backend = 'inductor': not installed.*eager"):
        settings.CompileSettings().check_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has them")
@pytest.mark.parametrize("chosen", [{"backend": "cudagraphs"}, {"attention": "cudnn"}])
def test_what_needs_a_gpu_says_so(settings, engine, chosen):
    with pytest.raises(engine("errors").InvalidSetting, match=r"NVIDIA GPU; choose"):
        settings.CompileSettings(**chosen).check_backend()


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("1024x768", (1024, 768, 1, 1)),
        ("832X480x33", (832, 480, 33, 1)),
        ("  512 x 512  batch 4 ", (512, 512, 1, 4)),
        ("832x480x33 batch 2", (832, 480, 33, 2)),
    ],
)
def test_sizes_are_read(engine, line, size):
    (read,) = engine("warmup_plan").parse_extra_sizes(f"\n# my sizes\n{line}\n")
    assert (read.width, read.height, read.length, read.batch) == size


@pytest.mark.parametrize("line", ["1024", "1024x", "1024x768 batch", "axb", "0x512", "512x512 batch 0", "512x512x1x1"])
def test_a_line_that_is_no_size_is_named(engine, line):
    with pytest.raises(engine("errors").InvalidSetting) as error:
        engine("warmup_plan").parse_extra_sizes(f"512x512\n{line}")
    assert "line 2" in str(error.value) and line in str(error.value)
