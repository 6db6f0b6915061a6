"""The tree as ruff and mypy want it, by the rules in pyproject.toml."""

import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_finds_nothing(command):
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True
    )
    files = [name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()] or ["."]  # an unpacked archive
    done = subprocess.run([sys.executable, "-m", "ruff", *command, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_nothing(tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
