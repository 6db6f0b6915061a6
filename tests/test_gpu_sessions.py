"""Sessions on a real server with a GPU, started as users start it: `pytest -m gpu tests/test_gpu_sessions.py`.

The models have the widths of real ones and a few of their blocks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.inprocess import host_folder

pytestmark = [pytest.mark.gpu, pytest.mark.server]

SCRIPT = Path(__file__).resolve().with_name("real_sessions.py")
# Errors are at most so many times what another attention kernel makes of the image.
NOISE = 3.0
# With more noise than this the comparison would show nothing.
LARGEST_YARDSTICK = 0.15


def tracebacks_of(log, part):
    """The tracebacks in a log that name a file below a folder of that name."""
    stacks = re.findall(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*.*", log)
    return [stack for stack in stacks if part in stack]


@pytest.mark.parametrize(
    ("model", "weights", "compile_now"),
    [
        ("sdxl_wide", "default", False),
        ("flux_wide", "default", True),
        ("sdxl_wide", "default", True),
        ("flux_wide", "int8", True),
    ],
    ids=["UNet by default", "DiT", "UNet", "INT8 DiT"],
)
def test_a_session_ends_nothing_and_every_image_is_right(tmp_path, model, weights, compile_now):
    command = [sys.executable, SCRIPT, "--host", host_folder(), "--model", model, "--weights", weights, "--folder", tmp_path]
    command += ["--compile-now"] * compile_now  # so few prompts may not be worth it
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    result = json.loads(done.stdout.splitlines()[-1])
    log = Path(result["log"]).read_text(encoding="utf-8", errors="replace")
    assert result["lives"], f"the server ended: {log[-3000:]}"
    assert result["problem"] is None
    assert "uncaptured free" not in log
    assert tracebacks_of(log, "torch-compile-kit") == []
    rows = {row["prompt"]: row for row in result["rows"]}
    assert "execution_interrupted" in rows["cancelled"]["messages"]
    # In some row: while code for a new batch is being made, none is counted. Whether so few prompts of a UNet pay for
    # compiling is for the machine to tell.
    compiled = max(row["compiled"] for row in rows.values())
    assert compiled > 0 or not compile_now, "the session shows nothing"
    assert rows["again"]["lowered"] == 0
    if rows["new size again"]["compiled"]:
        assert rows["back to the first size"]["uncompiled"] == 0, "the code that is there does not run"
    # Whether graphs pay for a DiT in bf16 is for the machine to tell.
    if (model, weights) != ("flux_wide", "default") or "CUDA graphs would not pay" not in log:
        assert rows["again"]["captures"] > 0 and rows["again"]["replays"] > 0, "no CUDA graph: the session shows nothing"
    noise = max(row.get("yardstick", 0.0) for row in rows.values())
    assert 0 < noise < LARGEST_YARDSTICK
    assert {name: row["errors"] for name, row in rows.items() if max(row.get("errors", [0.0])) > NOISE * noise} == {}
    assert max(rows["bypassed"]["errors"]) == 0.0
