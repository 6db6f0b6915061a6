"""The core of the suite inside older hosts, each in a process of its own; the README names the versions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import hosts

ROOT = Path(__file__).resolve().parent.parent
CORE = ["test_host_integrity.py", "test_host_lora.py", "test_host_weights.py"]
# These page weights in another way than 0.26 and later: their layers stay eager, and the tests of placing pages do not apply.
WITHOUT_PAGES = {"0.18.2", "0.16.3"}
# Minutes of compiling that say little about a host.
LONG = "with_and_without_warmup and not flux"


@pytest.mark.host
@pytest.mark.parametrize("version", [v for v in hosts.HOSTS if v != hosts.COMFYUI_VERSION])
def test_core_of_the_suite(version):
    folder = hosts.host_folder(version, sys.executable)
    chosen = ["-k", f"not ({LONG})", *(["-m", "not pages"] if version in WITHOUT_PAGES else [])]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--confcutdir=tests", *chosen, *(f"tests/{name}" for name in CORE)],
        cwd=ROOT,
        env={**os.environ, "COMFYUI_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout and "failed" not in result.stdout.splitlines()[-1]
