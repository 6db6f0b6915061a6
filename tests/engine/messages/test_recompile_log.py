"""The sentence about a call that had to compile: what differed from the nearest call that was compiled for, and the cure."""

import pytest

NODE = "To compile before the first image, add Torch Compile Warmup after Torch Compile"
SIZE = "Add 96x64 to extra_sizes, or set dynamic to true"
BATCH = "Add 64x64 batch 2 to extra_sizes"


@pytest.fixture
def caused(engine):
    """caused(before, now, dynamic, warmed, guard): sentence and size, of calls at 64x64 but for what is given."""
    log = engine("messages.recompile_log")

    def cause(before, now, dynamic="false", warmed=True, guard=""):
        calls = (log.CallInfo(**{"width": 64, "height": 64, **call}) for call in (before, now))
        return log.cause(*calls, dynamic, warmed, guard)

    return cause


@pytest.mark.parametrize(
    ("before", "now", "what", "cure", "size", "other_cure"),
    [
        ({}, {"width": 96}, "width changed from 64 to 96", SIZE, "96x64", "set dynamic to true"),
        ({"length": 5}, {"length": 9}, "length changed from 5 to 9", "Add 64x64x9 to", "64x64x9", "set dynamic to true"),
        ({}, {"batch": 2}, "the batch changed from 1 to 2", BATCH, "64x64 batch 2", ""),
        (
            {"batch": 2},
            {"batch": 3},
            "from 2 to 3",
            "batch 3 to extra_sizes, or set dynamic",
            "64x64 batch 3",
            "set dynamic to true",
        ),
        ({"width": 0, "batch": 2}, {"width": 0}, "changed from 2 to 1", "Connect the latent", None, ""),  # sound has no size
        (
            {},
            {"tokens": 40},
            "length changed from 0 to 40",
            "Set dynamic to auto, or connect a prompt",
            None,
            "set dynamic to auto",
        ),
        ({}, {"prompts_per_call": 2}, "2 prompts ran in one batch, not 1", "Give the warmup the sampler's cfg", None, ""),
        ({}, {"controlnet": True}, "a ControlNet was added", "after the ControlNet's node", None, ""),
        ({"controlnet": True}, {}, "a ControlNet was removed", "after the ControlNet's node", None, ""),
    ],
)
def test_each_difference_has_its_cure(caused, before, now, what, cure, size, other_cure):
    sentence, offered = caused(before, now)
    assert what in sentence and cure in sentence and offered == size
    sentence, offered = caused(before, now, warmed=False)
    assert sentence.endswith(f". {NODE}{other_cure and f'; or {other_cure}'}.") and what in sentence and offered is None


@pytest.mark.parametrize("warmed", [True, False])
def test_guards_are_told_only_as_details(caused, warmed):
    guard = "0/0: GLOBAL_STATE changed: num_threads"
    before, details = caused({}, {}, "auto", warmed, guard)[0].split("Details: ")
    assert details == guard and "GLOBAL_STATE" not in before
    assert guard not in caused({}, {"width": 96}, "auto", warmed, guard)[0]


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_run_names_the_warmup_but_where_waiting_was_chosen(engine, waits):
    log, stats = engine("messages.recompile_log"), engine("compile.session").CompileStats(graphs=2, seconds=3.0)
    when = "before first image" if waits else "in background"
    settings = engine("settings").CompileSettings(compile_when=when)
    sentence, _size = log.Watch().notice(log.CallInfo(64, 64), stats, settings)
    assert sentence == f"Waited 3.0 s for compiling: the first run{'' if waits else f'. {NODE}.'}"
