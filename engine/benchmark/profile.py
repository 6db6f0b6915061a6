"""Record one step with PyTorch's profiler, and count what it ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# One step to start the profiler, whose first events come late; the next one is recorded.
STEPS = 2


@contextmanager
def step_trace(path: Path, device: torch.device) -> Iterator[profile]:
    """Call `step()` at the end of each step; the second one is written to `path` as a Chrome trace (`.json`)."""
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    try:
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            acc_events=True,  # or it warns that events are cleared between cycles, of which there is one
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
        ) as recording:
            yield recording
    except BaseException:  # stopped on the way: half a step is no trace
        path.unlink(missing_ok=True)
        raise


def unit_for(device: torch.device) -> str:
    """What `count` counts on a device."""
    return {"cuda": "CUDA kernels", "xpu": "XPU kernels"}.get(device.type, "operators")


def count(path: Path, device: torch.device) -> int:
    """Kernels of a trace; operators (those inside others included) where there is no accelerator."""
    wanted = "kernel" if device.type in ("cuda", "xpu") else "cpu_op"
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return sum(event.get("cat") == wanted for event in events)
