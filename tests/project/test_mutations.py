"""devtools/mutations.py: what counts as caught, what as an error, and that the code is put back."""

import pytest

from devtools import mutations

CODE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = """
import pytest
import engine

def test_double():
    assert engine.double(3) == 6

def test_nothing():
    pass

@pytest.mark.parametrize("x", [3])
def test_sized(x):
    pass

@pytest.fixture
def broken():
    assert engine.half(3) == 1.5

def test_half(broken):
    pass

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass
"""
TABLE = """
# about the table

== first
doubles
engine.py
 def double(x):
-    return 2 * x
+    return x
tests/test_engine.py::test_double

halves
# why
engine.py
-    return x / 2
engine.py
+    return 1
 def double(x):
tests/test_engine.py::test_half
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "engine.py").write_text(CODE)
    (tmp_path / "tests" / "test_engine.py").write_text(TESTS)
    return tmp_path


def mutation(old, new, test="tests/test_engine.py::test_double"):
    return mutations.Mutation(7, "group", "claim", [mutations.Edit("engine.py", old, new)], [test])


def test_a_table_is_read():
    first, second = mutations.read_table(TABLE)
    assert (first.number, first.group, first.claim) == (1, "first", "doubles") and second.number == 2
    assert first.edits == [
        mutations.Edit("engine.py", ["def double(x):", "    return 2 * x"], ["def double(x):", "    return x"])
    ]
    assert first.tests == ["tests/test_engine.py::test_double"]
    assert [edit.old for edit in second.edits] == [["    return x / 2"], ["def double(x):"]] and second.comments == ["why"]


@pytest.mark.parametrize(
    ("old", "new", "test", "kind", "words"),
    [
        (["    return 2 * x"], ["    return 3 * x"], "test_double", "caught", "test_double"),
        (["    return 2 * x"], ["    return 3 * x"], "test_nothing", "not caught", ""),
        (["    return 4 * x"], ["    return 3 * x"], "test_double", "error", "engine.py has these lines 0 times"),
        (["return 2 * x"], ["return 3 * x"], "test_double", "error", "0 times"),
        ([""], ["import math"], "test_double", "error", "3 times, not once"),
        ([], ["import math"], "test_double", "error", "not once"),
        (["    return 2 * x"], ["    return ("], "test_double", "error", "no Python any more"),
        (["    return 2 * x"], ["    return 3 * x"], "test_other", "error", "there is no tests/test_engine.py::test_other"),
        (["    return 2 * x"], ["    return 3 * x"], "test_skipped", "error", "no test failed or passed"),
        (["    return x / 2"], ["    return x"], "test_half", "error", "no test failed or passed"),
    ],
    ids=["caught", "not caught", "moved", "part of a line", "twice", "anywhere", "no code", "no test", "skipped", "fixture"],
)
def test_how_a_row_ends(checkout, old, new, test, kind, words):
    outcome = mutations.run_row(mutation(old, new, f"tests/test_engine.py::{test}"), checkout)
    assert outcome.kind == kind and words in outcome.reason
    assert (checkout / "engine.py").read_text() == CODE


def test_what_fails_anyway_and_what_takes_for_ever_is_no_catch(checkout):
    row = mutation(["    return 2 * x"], ["    while True: pass"])
    assert mutations.failing_without_mutation(checkout, [row]) == []
    assert mutations.run_row(row, checkout, limit=3).reason == "the tests ran longer than 3 s"
    (checkout / "engine.py").write_text(CODE.replace("2 * x", "4 * x"))
    tests = ("test_nothing", "test_gone", "test_double[gone]", "test_sized[4]")
    others = [mutation([], [], f"tests/test_engine.py::{test}") for test in tests]
    failing = mutations.failing_without_mutation(checkout, [row, *others])
    assert failing == ["tests/test_engine.py::test_double"]
    outcome = mutations.run_row(row, checkout, failing)
    assert outcome.kind == "error" and "fails without the mutation" in outcome.reason


def test_all_edits_of_a_row_are_made_or_none(checkout):
    row = mutation(["    return 2 * x"], ["    return 3 * x"])
    row.edits.append(mutations.Edit("engine.py", ["gone"], ["come"]))
    assert mutations.run_row(row, checkout).kind == "error"
    assert (checkout / "engine.py").read_text() == CODE


def test_the_summary_counts_each_end():
    ends = {1: mutations.Outcome("caught"), 2: mutations.Outcome("not caught"), 3: mutations.Outcome("caught")}
    assert mutations.summary(ends) == "3 mutations: 2 caught, 1 not caught"
