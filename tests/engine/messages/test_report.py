"""The warmup's report: first what a person can do now, and what should be done."""

import collections
import types

import pytest


@pytest.fixture
def report(engine):
    """report(sizes, *groups): the lines above the details, and all of them."""
    found = engine("messages.report")
    plan = types.SimpleNamespace(whole_model=True, covered_share=1.0, blocks=[])
    stats = engine("compile.session").CompileStats
    code = types.SimpleNamespace(limit_reached=False)
    usual = {"failure": None, "code": code, "class_name": "Block", "stats": stats()}

    def make(sizes, *groups):
        warmed = [
            found.WarmedSize(label, 60.0, stats(graphs=graphs, seconds=seconds, from_disk=disk))
            for label, seconds, graphs, disk in sizes
        ]
        settings = types.SimpleNamespace(describe=lambda: "inductor")
        groups = [types.SimpleNamespace(**{**usual, **given}) for given in groups]
        text = found.CompileReport("Flux", settings, plan, groups, warmed, [], collections.Counter()).text()
        return text.split(found.RULE)[0].strip().splitlines(), text

    return make


@pytest.mark.parametrize(
    "sizes, named, done",
    [
        ([("1024x1024 batch 1", 12.2, 2, 0)], "1024x1024", "Compiled in 12 s."),
        ([("512x512 batch 1 (latent_image)", 0.1, 2, 0)], "512x512", "Compiled in 0 s."),
        ([("64x64 batch 2", 3, 2, 2)], "64x64 batch 2", "Read from disk in 3 s, nothing was compiled."),
        ([("64x64 batch 1", 9, 3, 1)], "64x64", "Compiled in 9 s, 1 of 3 kinds of blocks read from disk."),
        ([("64x64 batch 1", 0, 0, 0)], "64x64", "Nothing had to be compiled."),
        (
            [(f"{n}x64 batch 1", 0, 0, 0) for n in (8, 16, 24, 32, 40, 48)],
            "8x64, 16x64, 24x64, 32x64 and 2 more",
            "Nothing had to be compiled.",
        ),
    ],
)
def test_the_first_line_says_what_one_can_do(sizes, named, done, report):
    assert report(sizes, {})[0] == [f"Ready for {named}: images start without waiting. {done}"]


def test_what_should_be_done_stands_above_the_details_once(report):
    failure = types.SimpleNamespace(message=lambda: "Block could not be compiled. Install g++.")
    groups = {"failure": failure}, {"failure": failure}, {"code": types.SimpleNamespace(limit_reached=True)}
    (first, *to_do), text = report([("64x64 batch 1", 1, 1, 0)], *groups)
    assert first.startswith("Ready for 64x64")
    assert to_do == [
        "Block could not be compiled. Install g++.",
        "Block: cache_limit reached, new sizes run uncompiled. Set dynamic to auto, or raise cache_limit.",
    ]
    assert text.count("Install g++") == 1


def test_nothing_is_ready_where_nothing_compiles(report):
    failure = types.SimpleNamespace(message=lambda: "Block could not be compiled.")
    assert report([("64x64 batch 1", 1, 0, 0)], {"failure": failure})[0][0] == (
        "Nothing could be compiled: 64x64 runs as without this pack."
    )
