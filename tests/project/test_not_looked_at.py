"""A newcomer without Chromium reads at the end of the tests what was not looked at, and how to install it."""

import os
import subprocess
import sys

import not_looked_at
from support import ROOT

TEST = """
import pytest

@pytest.mark.skip(reason="Chromium is not installed: the page was not looked at")
@pytest.mark.parametrize("which", [1, 2])
def test_page(which): pass

@pytest.mark.skip(reason="Node is not installed: the page's scripts were not run")
def test_scripts(): pass

def test_passes(): pass
"""


def test_one_line_names_what_was_not_looked_at_and_the_command(tmp_path):
    """Before the line that CI reads, which stays the last one; with tests in another process, as `dev.py test` runs them."""
    (tmp_path / "test_it.py").write_text(TEST)
    plugins = ["-p", "xdist", "-p", "not_looked_at", "-n", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-c", os.devnull, "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("Not looked at: ")]
    assert "the page in a browser (Chromium is not installed, 2 skipped); the page's scripts (Node is not installed, 1" in line
    command = line.rpartition(" install ")[2]
    assert "chromium" in command and "node" in command
    assert line in lines[-3:] and "1 passed, 3 skipped" in lines[-1]


def test_nothing_is_said_where_all_was_looked_at_or_left_out_for_another_reason():
    assert not_looked_at.line(["a GPU has them", "Firefox is not installed"], has_compiler=True) is None


def test_without_a_compiler_the_line_says_why_tests_fail():
    line = not_looked_at.line([], has_compiler=False)
    assert "no C++ compiler" in line and "Chromium" not in line
    assert line.endswith(("apt-get install g++", "brew install gcc"))


def test_the_reasons_are_those_of_the_tests_that_are_skipped():
    """A reason that reads otherwise would leave the line out."""
    tests = ROOT / "tests"
    for file, program in (("browsing.py", "Chromium"), ("server/test_page.py", "Node")):
        assert f'reason="{program} is not installed' in (tests / file).read_text(encoding="utf-8")
    assert 'pytest.skip("redis-server is not installed' in (tests / "redis_servers.py").read_text(encoding="utf-8")
    assert set(not_looked_at.PROGRAMS) == {"Chromium", "Node", "redis-server"}
