"""Run the table of faults (tests/faults) and keep how each row ended in a results file.

python -m devtools.faults --comfyui FOLDER      # with the Python whose PyTorch is to be tested
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from . import hosts, matrix
from .commands import DEV, ROOT

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
COMMAND = "python -m devtools.faults --comfyui COMFYUI"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfyui", type=Path, required=True, help="the folder of ComfyUI")
    host = parser.parse_args().comfyui.resolve()
    DEV.mkdir(exist_ok=True)
    junit, began = DEV / "faults.xml", time.monotonic()
    junit.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "tests/faults"],
        cwd=ROOT,
        env={**os.environ, "COMFYUI_PATH": str(host)},
    )
    if junit.exists():
        probe = subprocess.run([sys.executable, "-c", matrix.PROBE], capture_output=True, text=True, check=True)
        run = {
            "comfyui": hosts.version_in(host),
            **json.loads(probe.stdout),
            "date": datetime.date.today().isoformat(),
            "command": COMMAND,
            "part": "faults",
            "seconds": round(time.monotonic() - began),
            **matrix.outcome(junit),
        }
        matrix.merge(RESULTS, run)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
