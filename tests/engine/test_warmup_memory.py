"""How much memory compiling takes, as the warmup's report tells it."""

import re
import subprocess
import sys

import pytest
import torch


def test_a_new_peak_is_told_and_an_old_one_is_not(engine):
    memory = engine("host.nodes.warmup_plan")
    peaks = memory.MemoryPeaks(torch.device("cpu"))
    above = memory.peak_of_ram() - peaks._used + 2**29  # of this process's highest so far
    held = torch.ones(above, dtype=torch.uint8)
    text = peaks.text()
    assert re.match(r"Memory since the start: up to [\d.]+ GiB of RAM, ([\d.]+) GiB taken by this warmup", text), text
    assert abs(float(re.search(r"([\d.]+) GiB taken", text)[1]) - above / 2**30) < 0.2
    del held
    assert "not raised by this warmup" in memory.MemoryPeaks(torch.device("cpu")).text()


@pytest.mark.parametrize("named", [["torch/_inductor/compile_worker"], ["engine/compile_process/child.py"], []])
def test_processes_that_compile_are_counted(engine, named):
    peaks = engine("host.nodes.warmup_plan").MemoryPeaks(torch.device("cpu"))
    before = peaks.text()
    child = subprocess.Popen([sys.executable, "-c", "input()", *named], stdin=subprocess.PIPE)
    try:
        count = int((re.search(r"GiB in (\d+) processes", before) or [0, 0])[1])
        now = int((re.search(r"GiB in (\d+) processes that compile beside it", peaks.text()) or [0, 0])[1])
        assert now == count + len(named)
    finally:
        child.communicate(b"\n")


def test_weights_that_the_host_pages_are_told_apart(engine, monkeypatch):
    memory = engine("host.nodes.warmup_plan")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 3 * 2**30)
    text = memory.MemoryPeaks(torch.device("cuda"), lambda: 22 * 2**30).text()
    assert "up to 3.0 GiB of VRAM and 22.0 GiB of weights that ComfyUI pages" in text
    assert memory.MemoryPeaks(torch.device("cuda")).text().endswith("up to 3.0 GiB of VRAM.")
