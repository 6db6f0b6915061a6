"""The core of the suite inside older hosts, each in a process of its own; the README names the versions."""

import os
import subprocess
import sys

import pytest
from support import ROOT

from devtools import hosts, suite

# The oldest for which the pack is published, and the oldest of those that page weights in another way; 0.18.2 does as that.
VERSIONS = ["0.26.0", "0.16.3"]


@pytest.mark.host
@pytest.mark.rest
@pytest.mark.parametrize("version", VERSIONS)
def test_core_of_the_suite(version):
    folder = hosts.host_folder(version, sys.executable)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--confcutdir=tests", *suite.arguments("core", version)],
        cwd=ROOT,
        env={**os.environ, "COMFYUI_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout and "failed" not in result.stdout.splitlines()[-1]
