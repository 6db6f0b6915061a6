"""The line on a node: only what really ran is told."""

import functools
import types
import weakref

import pytest
import torch

SHAPE = (1, 4, 8, 8)
NOBODY = (None, None)


@pytest.fixture
def clock(engine, monkeypatch):
    """clock(seconds): so much time passes, for the line."""
    now = [100.0]
    passes = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(engine("messages.status"), "time", passes)
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.fixture
def node(engine, clock, monkeypatch):
    """The line of a node whose model has one group of blocks, and what the page was told."""
    settings = engine("settings").CompileSettings()
    monkeypatch.setattr(engine("messages.status"), "lines", {})
    found = engine("messages.status").Status("7", settings)
    found.group = types.SimpleNamespace(
        class_name="Block",
        failure=None,
        stats=types.SimpleNamespace(graphs=0),
        code=types.SimpleNamespace(is_being_lowered=False, is_tracing=False, is_only_read=False),
    )
    code = types.SimpleNamespace(
        groups={("Block", settings.settings_key()): found.group}, failures=[], taken=[], waits_for=None, uncalled=None
    )
    code.groups_of = functools.partial(engine("compile.registry").ModelCode.groups_of, code)
    for module in ("status", "report"):
        monkeypatch.setattr(engine(f"messages.{module}"), "code_of", lambda network: code)
    found.code = code
    found.told = []
    monkeypatch.setattr(engine("messages.status"), "listeners", [lambda *news: found.told.append(news)])
    found.network = torch.nn.Identity()
    return found


def run(node, clock, seconds, eager=False, other=False, calls=1, inputs=SHAPE):
    """A sampling run with steps of so many seconds; the first loads the weights."""
    node.new_run()
    for taken in (5.0, *seconds):
        step = object()
        for number in range(calls):
            node.begins(node.network, step, inputs if number == 0 else SHAPE)
            clock(taken / calls)
            node.ends(eager, other)


def said(node):
    """State and line, as the page was told last."""
    owner, told_of, line = node.told[-1]
    assert (owner, told_of) == (NOBODY, "7")
    return line.state, line.says


@pytest.mark.parametrize(
    ("is_tracing", "is_only_read", "waits", "says"),
    [
        (True, False, False, "preparing"),
        (False, False, False, "compilingKind"),
        (True, False, True, "compilingFirst"),  # the wait was chosen, and its seconds are counted
        (False, False, True, "compilingFirst"),
        (False, True, False, "readingFromDisk"),
    ],
)
def test_what_a_call_waits_for_is_told(node, engine, is_tracing, is_only_read, waits, says):
    if waits:
        node._settings = engine("settings").CompileSettings(compile_when="before first image")
    node.group.code.is_being_lowered, node.group.code.is_tracing, node.group.code.is_only_read = True, is_tracing, is_only_read
    node.begins(node.network, object(), SHAPE)
    node.tell()
    assert said(node) == ("compiling", ["forSeconds", [says]]) and node.told[-1][2].seconds == 0


def test_from_compiling_to_ready(node, clock):
    node.group.code.is_being_lowered = True
    run(node, clock, [0.2] * 6, eager=True)
    assert said(node) == ("compiling", ["forSeconds", ["compilingKind"]])
    assert len(node.told) == 1, "the page counts the seconds"
    assert node.now().seconds == 1, "from these, where it is opened later"
    node.group.code.is_being_lowered, node.group.stats.graphs = False, 1
    node.tell()
    assert said(node) == ("ready", ["ready"])
    run(node, clock, [0.15] * 6)
    faster = ["faster", "25%", "0.200", "0.150"]
    assert said(node) == ("faster", ["readyBut", faster])
    node.group.stats.graphs = 2
    run(node, clock, [0.15] * 2)
    assert said(node) == ("faster", ["readyBut", faster]), "another size was compiled too, which says nothing to the user"


def test_the_thread_that_compiles_tells_the_line_meanwhile(node, engine, monkeypatch):
    """Before this a call of the model could end with a TypeError, and the image with it."""
    node.group.code.is_being_lowered = True
    node.begins(node.network, object(), SHAPE)

    def another_thread_says_ready():
        node._compiling_since = None
        return 100.0

    monkeypatch.setattr(engine("messages.status").time, "monotonic", another_thread_says_ready)
    node.tell()
    assert said(node) == ("compiling", ["forSeconds", ["compilingKind"]])


def test_while_the_compiler_is_imported_the_line_says_that_compiling_comes_next(node, clock, engine):
    run(node, clock, [1.0])
    assert said(node)[0] == ""
    node.code.waits_for = engine("compile.registry").WaitsFor.IMPORT
    run(node, clock, [1.0])
    assert said(node) == ("unclear", ["beginsNext"])


def test_before_it_is_compiled_the_line_says_what_replays_gain(node, clock, engine):
    watch = engine("messages.recompile_log").watch_of(node.network)
    run(node, clock, [0.2] * 6, eager=True)
    assert said(node)[0] == ""
    run(node, clock, [0.1] * 6)
    replayed = ["replayed", ["faster", "50%", "0.200", "0.100"]]
    assert said(node) == ("faster", replayed)
    watch.put_off = lambda: (7, "a" * 12)
    assert node.now() == ("faster", [replayed, ["putOff", 7]], None, "a" * 12)
    watch.foreign = "a pack"
    assert node.now() == ("unclear", [["putOff", 7], ["graphsOff", "a pack"]], None, "a" * 12)
    watch.put_off, watch.foreign = (lambda: None), None
    run(node, clock, [0.5] * 6, inputs=("another",))
    assert node.now()[:2] == ("unclear", ["replayed", ["aStep", "0.500"]])


def test_where_nothing_is_replayed_any_more_the_line_does_not_say_so(node, clock):
    run(node, clock, [0.2] * 6, eager=True)
    run(node, clock, [0.1] * 6)
    assert said(node)[1][0] == "replayed"
    run(node, clock, [0.2] * 3, eager=True)
    assert said(node)[0] == ""


@pytest.mark.parametrize("graphs, expected", [(0, ("", ())), (1, ("ready", ["ready"]))])
def test_a_call_that_was_cancelled_leaves_no_line_of_before(node, graphs, expected):
    """At once: it has ended in the middle of compiling."""
    node.group.code.is_tracing = True
    node.begins(node.network, object(), SHAPE)
    node.tell()
    assert said(node)[0] == "compiling"
    node.group.code.is_tracing, node.group.stats.graphs = False, graphs
    node.stopped()
    assert said(node) == expected


def test_what_was_gained_is_counted_from_steps_that_ran_both_ways(node, clock, engine):
    use = engine("messages.recompile_log").watch_of(node.network)
    run(node, clock, [0.2] * 2, eager=True)
    run(node, clock, [0.1] * 5)
    assert use.gained is None, "two steps say nothing"
    run(node, clock, [0.2] * 3, eager=True)
    run(node, clock, [0.1] * 6)
    run(node, clock, [0.3] * 2)
    assert use.gained == pytest.approx(5 * 0.1 - 0.1) and use.saved == pytest.approx(0.5)


@pytest.mark.parametrize("uncompiled, compiled", [((0.4, 2), (0.2, 1)), ((0.2, 1), (0.4, 2)), ((0.4, 3), (0.2, 2))])
def test_steps_that_compute_more_are_not_compared(node, clock, engine, uncompiled, compiled):
    """CFG 1 beside 4, where the negative prompt is a call of its own."""
    node.group.stats.graphs = 1
    (before, calls), (now, calls_now) = uncompiled, compiled
    run(node, clock, [before] * 6, eager=True, calls=calls)
    run(node, clock, [now] * 6, calls=calls_now)
    assert said(node) == ("ready", ["readyBut", ["aStep", f"{now:.3f}"]])
    assert engine("messages.recompile_log").watch_of(node.network).gained is None
    run(node, clock, [before / 2] * 6, calls=calls)
    assert said(node)[1][1][:2] == ["faster", "50%"]


def test_steps_with_other_inputs_are_not_compared(node, clock):
    node.group.stats.graphs = 1
    run(node, clock, [0.4] * 6, eager=True, inputs="a ControlNet")
    run(node, clock, [0.2] * 6)
    assert said(node)[1][1] == ["aStep", "0.200"]
    run(node, clock, [0.2] * 6, inputs="a ControlNet")
    assert said(node)[1][1][:2] == ["faster", "50%"]


@pytest.mark.parametrize("seconds, faster", [(0.2, True), (0.5, False)])
def test_where_each_prompt_has_another_length_shorter_ones_are_compared_with(node, clock, seconds, faster):
    """They compute less: only that compiled steps are faster can be told."""
    node.group.stats.graphs = 1
    run(node, clock, [0.4] * 6, eager=True, inputs=("64x64", (1, 20)))
    for inputs in (("64x64", (1, 21)), ("64x64", (1, 19)), ("32x64", (1, 21)), ("64x64", (1, 21), "a ControlNet")):
        run(node, clock, [seconds] * 6, inputs=inputs)
        is_longer = inputs == ("64x64", (1, 21))
        assert said(node)[1][1][0] == ("faster" if faster and is_longer else "aStep")


def test_steps_of_a_few_inputs_are_kept_those_that_ran_last(node, clock, engine):
    node.group.stats.graphs = 1
    for inputs in ("this", "that"):
        run(node, clock, [0.4] * 6, eager=True, inputs=inputs)
    for number in range(engine("messages.status").MOST_INPUTS - 1):
        run(node, clock, [0.2] * 2, inputs=f"a prompt of {number} tokens")
        run(node, clock, [0.2] * 6, inputs="this")
    assert said(node)[1][1][:2] == ["faster", "50%"]
    run(node, clock, [0.2] * 6, inputs="that")
    assert said(node)[1][1] == ["aStep", "0.200"]


def test_nothing_is_claimed_that_has_not_run(node, clock):
    node.group.stats.graphs = 1
    run(node, clock, [0.15] * 2)
    assert node.now()[:2] == ("ready", ["ready"])
    run(node, clock, [0.15] * 6)
    assert node.now()[:2] == ("ready", ["readyBut", ["aStep", "0.150"]])


@pytest.mark.parametrize(
    "before, now, state, words",
    [
        ([0.2] * 6, [0.25] * 6, "slower", ["slower", "1.25", "0.200", "0.250"]),
        ([0.2] * 6, [0.201] * 6, "unclear", ["noDifference", "0.201"]),
        ([0.2, 0.9, 0.2, 0.7, 0.3, 0.2], [0.2, 0.8, 0.6, 0.9, 0.2, 0.9], "unclear", ["noDifference", "0.700"]),
        ([0.8, 0.9, 0.2, 0.7, 0.3, 0.6], [0.2, 0.3, 0.6, 0.4, 0.2, 0.5], "unclear", ["noDifference", "0.350"]),
        ([0.2, 0.21, 0.19, 0.2, 0.2, 3.0], [0.9, 1.0, 1.1, 1.0], "slower", ["slower", "5.00", "0.200", "1.000"]),
    ],
    ids=["slower", "the same", "medians apart", "medians apart, faster", "far slower"],
)
def test_a_difference_is_claimed_only_where_the_times_do_not_overlap(node, clock, before, now, state, words):
    run(node, clock, [*before, 9.0], eager=True)  # the last has no step behind it that tells when it was over
    node.group.stats.graphs = 1
    run(node, clock, [*now, 9.0])
    assert node.now()[:2] == (state, ["readyBut", words])


def test_what_runs_uncompiled_since_it_is_slower_compiled_is_told(node, clock, engine):
    node.group.stats.graphs, slower = 1, ["slowerCompiled", "1.50", "0.200", "0.300"]
    engine("messages.recompile_log").watch_of(node.network).left_slower = slower
    run(node, clock, [0.2] * 6, eager=True)
    assert said(node) == ("slower", ["readyBut", slower])


@pytest.fixture
def prompt_of(engine, monkeypatch):
    """prompt_of(client, workflow): its prompt runs from now on."""
    monkeypatch.setattr(engine("messages.status"), "lines", {})
    return lambda *owner: monkeypatch.setattr(engine("messages.status"), "owner_now", lambda: owner)


def test_a_line_belongs_to_the_prompt_that_runs(node, prompt_of, engine):
    """Two workflows may have the same node ids, and so may two users; what is cached runs for whoever asks."""
    status, settings = engine("messages.status"), engine("settings").CompileSettings()
    prompt_of("me", "workflow")
    first = status.Status("7", settings)
    prompt_of("them", "workflow")
    status.Line("7").put("decoding", ["vaeReady"])
    node.group.stats.graphs = 1
    first._network = weakref.ref(node.network)
    status.tell_all()
    assert [(owner, news.says) for owner, _node, news in node.told] == [
        (("them", "workflow"), [["vaeReady"]]),
        (("me", "workflow"), ["ready"]),
    ]
    assert list(status.lines_of("me", "workflow")) == ["7"] and status.lines_of("me", "another") == {}
    first.new_run()  # their prompt has found our node's model in the host's cache
    node.told.clear()
    first.tell()
    assert [owner for owner, *_ in node.told] == [("me", "workflow"), ("them", "workflow")], "both workflows use it"
    assert status.lines_of("me")["7"].says == status.lines_of("them")["7"].says == ["ready"]
    prompt_of("me", "workflow")
    status.Status("7", settings)  # our node runs anew: the other code is no longer ours
    first._told = None
    node.told.clear()
    status.tell_all()
    assert [owner for owner, *_ in node.told] == [("them", "workflow")]
    assert status.lines_of("me")["7"].says == ["ready"], "until the model runs"


def test_a_script_under_a_new_name_for_each_prompt_leaves_no_pages_behind(engine, prompt_of):
    status = engine("messages.status")
    line = status.Line("7")
    for number in range(100):
        prompt_of(str(number), None)
        line.put("decoding", ["vaeReady"])
    assert len(status.lines) == status.MOST_OWNERS and list(status.lines_of("99")) == ["7"]


def test_a_line_that_stays_is_shown_in_a_page_that_was_opened_since(engine, prompt_of, monkeypatch):
    """What is told but once, such as a VAE's layout: ComfyUI does not run the node again for that page."""
    status, told = engine("messages.status"), []
    prompt_of("me", "workflow")
    line = status.Line("7")
    line.put("decoding", ["vaeReady"])
    monkeypatch.setattr(status, "listeners", [lambda owner, *_: told.append(owner)])
    line.new_run()
    assert not told
    prompt_of("me again", "workflow")
    line.new_run()
    line.new_run()
    assert told == [("me", "workflow"), ("me again", "workflow")]
    assert status.lines_of("me again")["7"].says == [["vaeReady"]]


def test_lines_stay_when_comfyui_frees_their_nodes_output_the_newest_of_them(engine, prompt_of):
    status = engine("messages.status")
    prompt_of("me", "workflow")
    for number in range(2 * status.MOST_LINES):
        status.Line(str(number)).put("decoding", ["vaeReady"])
    assert len(status.lines_of("me", "workflow")) == status.MOST_LINES and status.lines_of("me", "another") == {}
    assert status.lines_of("me", "workflow")["399"].says == [["vaeReady"]]
    status.forget_line("399")
    assert "399" not in status.lines_of()


def test_a_line_does_not_go_on_compiling_when_its_model_was_freed(node, clock):
    node.group.code.is_being_lowered = True
    run(node, clock, [])
    assert said(node)[0] == "compiling"
    node.network = None
    node.tell()
    node.tell()
    assert [line.state for _owner, _node, line in node.told] == ["compiling", ""]


def test_a_node_that_runs_again_is_not_shown_as_compiling_what_it_has_replaced(node, clock, engine):
    node.group.code.is_being_lowered = True
    run(node, clock, [])
    assert said(node)[0] == "compiling"
    again = engine("messages.status").Status("7", node._settings)
    engine("messages.status").tell_all()
    assert said(node) == ("", ()) and again.now() == engine("messages.status").News()


def test_lines_may_be_added_while_they_are_told(engine, prompt_of, monkeypatch):
    """By another thread: a node that runs, beside the one that compiles."""
    status = engine("messages.status")
    prompt_of(None, None)
    for number in range(3):
        status.Line(str(number))
    monkeypatch.setattr(status.Line, "tell", lambda self: status.Line(f"{self.node} more"))
    status.tell_all()
    assert len(status.lines) == 6


def test_steps_that_did_something_else_do_not_count(node, clock):
    node.group.stats.graphs = 1
    run(node, clock, [9.0] * 6, other=True)
    run(node, clock, [0.1] * 6, calls=2)
    assert node.now()[:2] == ("ready", ["readyBut", ["aStep", "0.100"]]), "two calls of the model make a step"


def test_a_block_that_cannot_be_compiled(node, clock):
    node.group.failure, node.group.stats.graphs = "why", 1
    run(node, clock, [0.2] * 4)
    assert node.now()[:2] == ("failed", ["runsUncompiled", "Block"])


def test_what_other_settings_of_the_model_came_to_is_not_told(node, clock, engine):
    """Those of another node, or of this one before it was changed as its cure says."""
    other = engine("settings").CompileSettings(fullgraph=True).settings_key()
    node.code.groups["Block", other] = types.SimpleNamespace(**{**vars(node.group), "failure": "a graph break"})
    node.group.stats.graphs = 1
    run(node, clock, [])
    assert said(node) == ("ready", ["ready"])
