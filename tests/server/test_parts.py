"""The benchmark of VAE, ControlNet and training runs on real servers, with small models."""

import json
import subprocess
import sys

import pytest

from devtools.inprocess import host_folder
from devtools.server import ROOT

pytestmark = [pytest.mark.server, pytest.mark.rest]


def test_a_part_is_measured_in_all_variants(tmp_path):
    """Code is only traced: compiling it takes half a minute each."""
    command = [sys.executable, "-m", "benchmarks.parts", "--host", host_folder(), "--tiny", "--folder", tmp_path / "base"]
    command += ["--out", tmp_path / "parts.json", "--settings", '{"backend": "eager"}']
    parts = ["vae-sdxl", "training-sdxl"]
    subprocess.run([*map(str, command), "--parts", *parts], cwd=ROOT, check=True)
    rows = json.loads((tmp_path / "parts.json").read_text())["rows"]
    assert [(row["setup"], row["variant"]) for row in rows] == [(part, who) for part in parts for who in ("eager", "ours")]
    for row in rows:
        assert row["kind"] == "part" and "died" not in row and row.get("failures", []) == [], row
        steps = 1 if row["part"] == "vae" else 3
        assert [len(prompt["steps"]) for prompt in row["prompts"]] == [steps] * 2, "a step is noted as it is done"
        assert row["first"] > 0 and row["step"] > 0 and row["seconds"] >= row["step"]
    assert rows[1]["error"] == 0.0, "on a CPU the VAE is left as it is"
    assert rows[2]["graphs"] == 0 and rows[3]["graphs"] > 0, "training ran uncompiled"
