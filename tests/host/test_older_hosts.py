"""The core of the suite inside the oldest host for which the pack is published, in a process of its own."""

import os
import subprocess
import sys

import pytest
from support import ROOT

from devtools import hosts, suite


@pytest.mark.host
@pytest.mark.rest
def test_core_of_the_suite():
    folder = hosts.host_folder("0.26.0", sys.executable)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--confcutdir=tests", *suite.arguments("core")],
        cwd=ROOT,
        env={**os.environ, "COMFYUI_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout and "failed" not in result.stdout.splitlines()[-1]
