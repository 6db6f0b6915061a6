"""`python dev.py lint` finds what is planted, runs every step, and ends with 1 if one of them failed."""

import shutil
import sys

import pytest
from support import ROOT

from devtools import inprocess, lint

CLEAN = '"""A module."""\n\nVALUE: int = 1\n'


@pytest.fixture
def tree(tmp_path):
    """A checkout with two modules, by the rules of this one."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for room in ("engine", "nodes"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "module.py").write_text(CLEAN)
    return tmp_path


def outcomes(tree, names):
    """Step -> whether it found nothing."""
    chosen = [step for step in lint.steps(sys.executable, inprocess.host_folder()) if step.name in names]
    return {step.name: lint.run_step(step, tree)[0] for step in chosen}


def test_each_tool_finds_a_planted_mistake(tree):
    """One mistake a tool, so that none is found by another's step."""
    tools = {"ruff", "format", "mypy", "registry"}
    assert outcomes(tree, tools) == dict.fromkeys(tools, True)
    planted = {
        "ruff": 'import os\n\nVALUE = "an import that nothing uses"\n',
        "format": "VALUE   =  1\n",
        "mypy": 'VALUE: int = "no number"\n',
        "registry": "def run(text):\n    exec(text)\n",
    }
    for tool, code in planted.items():
        (tree / "engine" / "module.py").write_text(f'"""A module."""\n\n{code}')
        assert outcomes(tree, {tool}) == {tool: False}


def test_all_steps_run_though_one_fails_and_each_is_told(capsys, tmp_path):
    def step(name, code, refused=None):
        return lint.Step(name, (sys.executable, "-c", code), refused)

    chosen = [
        step("first", "import sys; print('a.py is wrong'); print('why', file=sys.stderr); sys.exit(3)"),
        step("second", "print('a warning, and 0')", "warning"),
        step("third", "print('nothing is wrong')", "warning"),
    ]
    assert lint.run_steps(chosen, tmp_path) == 2
    told = capsys.readouterr().out
    assert told.count("FAILED") == 2 and "a.py is wrong" in told and "why" in told and "a warning, and 0" in told
    assert next(line for line in told.splitlines() if line.startswith("ok")).endswith("nothing is wrong")
    assert lint.run_steps(chosen[2:], tmp_path) == 0
