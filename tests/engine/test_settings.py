"""Settings and sizes: what is accepted, and what the errors say."""

import subprocess
import sys

import pytest
import torch
from support import ROOT


@pytest.fixture
def settings(engine):
    return engine("settings")


def test_defaults_are_the_documented_ones(settings):
    chosen = settings.CompileSettings()
    assert (chosen.backend, chosen.mode, chosen.dynamic, chosen.fullgraph) == ("inductor", "auto", "auto", False)
    assert (chosen.cache_limit, chosen.block_swap, chosen.attention) == (0, "auto", "auto")
    assert (chosen.on_failure, chosen.allow_tf32, chosen.cudnn_benchmark) == ("run uncompiled", False, False)
    assert (chosen.only_blocks, chosen.compile_when) == ("", "in background")


def test_equal_settings_are_one_value(settings):
    assert settings.CompileSettings() == settings.CompileSettings()
    assert len({settings.CompileSettings(), settings.CompileSettings()}) == 1


def test_mode_needs_inductor(settings, engine):
    with pytest.raises(engine("errors").InvalidSetting, match=r"mode = 'max-autotune'.*inductor"):
        settings.CompileSettings(backend="eager", mode="max-autotune")


def test_options_are_fresh_and_expand_the_mode(settings):
    chosen = settings.CompileSettings(mode="max-autotune-no-cudagraphs")
    assert chosen.inductor_options()["max_autotune"] is True
    assert chosen.inductor_options() is not chosen.inductor_options()


def test_choosing_a_backend_imports_no_compiler():
    """That took half a second of everybody's first image."""
    code = (
        "import sys; from engine.settings import CompileSettings; CompileSettings().check_backend(); "
        "sys.exit(any(name in sys.modules for name in ('torch._inductor.compile_fx', 'torch._functorch.aot_autograd')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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
        ("1024\u00d7768", (1024, 768, 1, 1)),
    ],
)
def test_sizes_are_read(engine, line, size):
    (read,) = engine("host.nodes.warmup_plan").parse_extra_sizes(f"\n# my sizes\n{line}\n")
    assert (read.width, read.height, read.length, read.batch) == size


@pytest.mark.parametrize("line", ["1024", "1024x", "1024x768 batch", "axb", "0x512", "512x512 batch 0", "512x512x1x1"])
def test_a_line_that_is_no_size_is_named(engine, line):
    with pytest.raises(engine("errors").InvalidSetting) as error:
        engine("host.nodes.warmup_plan").parse_extra_sizes(f"512x512\n{line}")
    assert "line 2" in str(error.value) and line in str(error.value)


def test_an_error_has_a_module_that_people_can_read(engine):
    """ComfyUI shows it, and the page knows our errors by it."""
    for error in (engine("errors").InvalidSetting, engine("cache.archive").CacheFileError):
        assert error.__module__ == "torch_compile_kit"


def test_several_sizes_on_a_line(engine):
    read = engine("host.nodes.warmup_plan").parse_extra_sizes("1024x1024; 768x768 batch 2,\n# 1x1, 2x2\n832x480x33")
    assert [size.label() for size in read] == ["1024x1024 batch 1", "768x768 batch 2", "832x480x33 batch 1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("512x512\n99999x99999", r"extra_sizes = '99999x99999': line 2: width = 99999: use 1 to 16384"),
        ("512x99999", "height = 99999"),
        ("512x512x99999", "length = 99999"),
        ("512x512 batch 99999", "batch = 99999"),
        ("9" * 5000 + "x512", "is no size"),
        ("64x64\n" * 101, "101 sizes; use at most 100"),
        ("64x64\n" * 10_000, "at most 10,000 characters"),
        ("9" * 10_000_000, "at most 10,000 characters"),
    ],
    ids=lambda value: value[:20],
)
def test_sizes_have_limits(engine, text, said):
    with pytest.raises(engine("errors").InvalidSetting, match=said) as error:
        engine("host.nodes.warmup_plan").parse_extra_sizes(text)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("size", [(16385, 64), (64, 0), (64, 64, 16385), (64, 64, 1, 4097)])
def test_a_linked_number_beyond_the_limits_is_named(engine, size):
    with pytest.raises(engine("errors").InvalidSetting, match="use 1 to"):
        engine("host.nodes.warmup_plan").Size(*size)


@pytest.mark.parametrize("value", ["a" * 10_000_000, ["a" * 10_000_000], 10**5000], ids=["text", "list", "number"])
def test_messages_show_the_beginning_of_long_values(engine, value):
    error = engine("errors").InvalidSetting("only_blocks", value, "use another.")
    assert len(str(error)) < 300 and len(repr(error)) < 300
    if isinstance(value, str):
        assert "10,000,000 characters" in str(error) and len(error.value) < 300


def test_patterns_have_a_limit(settings, engine):
    with pytest.raises(engine("errors").InvalidSetting, match=r"only_blocks.*at most 10,000 characters") as error:
        settings.CompileSettings(only_blocks="*," * 5_000_000)
    assert len(str(error.value)) < 500
    assert settings.CompileSettings(only_blocks="*," * 5000).patterns == ("*",)


def test_one_line_says_what_was_chosen(engine):
    settings = engine("settings").CompileSettings
    assert settings().describe() == "inductor, dynamic auto"
    chosen = settings(mode="max-autotune-no-cudagraphs", dynamic="true", fullgraph=True, cache_limit=32, only_blocks="a.*")
    assert chosen.describe() == "inductor, max-autotune-no-cudagraphs, dynamic true, fullgraph, cache limit 32, only a.*"
