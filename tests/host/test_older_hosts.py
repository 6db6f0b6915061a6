"""The core of the suite inside older hosts, each in a process of its own; the README names the versions."""

import os
import subprocess
import sys

import pytest
from support import ROOT

from devtools import hosts, suite


@pytest.mark.host
@pytest.mark.rest
@pytest.mark.parametrize("version", [v for v in hosts.HOSTS if v != hosts.COMFYUI_VERSION])
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
