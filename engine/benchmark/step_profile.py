"""Record a step with PyTorch's profiler, and add up where the step's time goes.

On a GPU each moment counts once: for the kernel that runs, else for a transfer of weights, else as waiting. Without a GPU each
moment of the sampler's thread counts for the outermost operator of a kind in KINDS, else for a compiled region, else as other.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# One step to warm up the profiler, whose first events come late, and one step that is recorded.
TRACE_STEPS = 2
FUSED, ATTENTION, PRODUCTS, CONVOLUTIONS, OTHER = "fused", "attention", "products", "convolutions", "other"
TRANSFERS, WAITING = "transfers", "waiting"
# Patterns for lower-case names of kernels and operators; the first match wins: a fused kernel's name may match others too.
KINDS = {
    FUSED: re.compile(r"^triton_(?!tem_)"),
    ATTENTION: re.compile(r"fmha|flash|attention|attn|sdpa|sage_|softmax"),
    CONVOLUTIONS: re.compile(r"conv(?!ert)|fprop|winograd|implicit_gemm|nchwtonhwc|nhwctonchw"),
    PRODUCTS: re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|wgmma|matmul|triton_tem_|cijk_|::linear|mm$|_mm"),
}
UNCOMPILED = "uncompiled "  # before the name of blocks whose compiling has failed (compile/group.py, `_call`)
_COMPILED = "Torch-Compiled Region"
_TRANSFER = re.compile(r"htod|dtoh|hosttodevice|devicetohost|m2d|d2m", re.IGNORECASE)
# If transfers take this share of a step, the step cannot get much shorter, whatever runs beside them.
_SATURATED = 0.8
# Begin and end in microseconds, layer (see `_seconds`), kind.
_Interval = tuple[float, float, int, str]


@dataclass(frozen=True)
class StepProfile:
    """Where the time of one step goes."""

    span: float
    seconds: dict[str, float]  # by kind; blocks whose compiling has failed are kinds of their own
    compiled: float = 0.0  # how many of these seconds are in compiled blocks or in CUDA graphs
    transferring: float = 0.0  # seconds of transfers, also of those beside kernels
    transferred: int = 0  # bytes
    on_gpu: bool = True

    def of_step(self, step: float) -> dict[str, float]:
        """Scale the seconds by kind to a step that took `step` seconds without the profiler, which slows down launching."""
        busy = {kind: seconds for kind, seconds in self.seconds.items() if kind != WAITING or not self.on_gpu}
        total = sum(busy.values())
        share = min(1.0, step / total) if self.on_gpu and total else step / self.span
        parts = {kind: share * seconds for kind, seconds in busy.items()}
        if self.on_gpu:
            parts[WAITING] = step - sum(parts.values())
        if self.transferring >= _SATURATED * self.span:
            parts[TRANSFERS] = step * self.transferring / self.span
        return parts

    @property
    def compiled_share(self) -> float:
        busy = sum(seconds for kind, seconds in self.seconds.items() if kind not in (WAITING, TRANSFERS))
        return self.compiled / busy if busy else 0.0


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if words.search(name.lower())), OTHER)


@contextmanager
def step_trace(path: Path, device: torch.device) -> Iterator[profile]:
    """Yield a profiler; call its `step()` after each step. The second step is written to `path` as a Chrome trace (`.json`)."""
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    one_step = schedule(wait=0, warmup=1, active=1, repeat=1)
    # without `acc_events` PyTorch warns that events are cleared between cycles; there is one cycle
    with profile(activities=activities, schedule=one_step, acc_events=True) as recording:
        yield recording
    recording.export_chrome_trace(str(path))


def unit_for(device: torch.device) -> str:
    return {"cuda": "CUDA kernels", "xpu": "XPU kernels"}.get(device.type, "operators")


def events_of(path: Path) -> list[dict]:
    """The events of a Chrome trace file that have a duration."""
    with open(path, encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def count(events: list[dict], device: torch.device) -> int:
    """How many kernels a trace has or, without an accelerator, how many operators, nested ones included."""
    wanted = "kernel" if device.type in ("cuda", "xpu") else "cpu_op"
    return sum(event.get("cat") == wanted for event in events)


def profile_of(events: list[dict]) -> StepProfile | None:
    """Where the time goes in the step that `events` record; None if they hold no step."""
    operators = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    step = next((event for event in operators if event["name"].startswith("ProfilerStep")), None)
    if step is None:
        return None
    operators.remove(step)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return _on_gpu(events, work, step, operators) if work else _on_cpu(operators, step)


def _on_gpu(events: list[dict], work: list[dict], step: dict, operators: list[dict]) -> StepProfile:
    launches = {_correlation(e): e for e in events if e.get("cat", "").endswith(("runtime", "driver"))}
    operators = sorted(operators, key=lambda e: (e["ts"], -e["dur"]))  # if nested, the outermost first
    regions, failed_blocks = ([e for e in operators if e["name"].startswith(name)] for name in (_COMPILED, UNCOMPILED))
    kernels, transfers, transferred, compiled = [], [], 0, 0.0
    for event in work:
        launch = launches.get(_correlation(event), {})
        if event["cat"] == "gpu_memcpy" and _TRANSFER.search(event["name"]):
            transferred += event.get("args", {}).get("bytes", 0)
            # The launch counts too: from memory that is not pinned, the CPU itself copies, and launches nothing meanwhile.
            transfers += [_interval(e, 1, TRANSFERS) for e in (event, launch) if e]
            continue
        kernels.append(_interval(event, 0, _name_around(launch, failed_blocks) or kind_of(event["name"])))
        if _name_around(launch, regions) or "GraphLaunch" in launch.get("name", ""):
            compiled += event["dur"] / 1e6
    seconds = _seconds([*kernels, *transfers, _interval(step, 2, WAITING)])
    busy = sum(_seconds(kernels).values())
    return StepProfile(step["dur"] / 1e6, seconds, min(compiled, busy), sum(_seconds(transfers).values()), transferred)


def _on_cpu(operators: list[dict], step: dict) -> StepProfile:
    """The profile of a step without a GPU: only the sampler's thread counts, not the worker."""
    here = [e for e in operators if e["tid"] == step["tid"] and step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
    intervals = [_interval(step, 3, WAITING)]
    for event in here:
        kind = event["name"] if event["name"].startswith(UNCOMPILED) else kind_of(event["name"])
        intervals.append(_interval(event, 2 if kind == OTHER else 0, kind))
    regions = [_interval(e, 1, FUSED) for e in operators if e["tid"] == step["tid"] and e["name"].startswith(_COMPILED)]
    compiled = sum(_seconds(regions).values())
    return StepProfile(step["dur"] / 1e6, _seconds(intervals + regions), compiled, on_gpu=False)


def _interval(event: dict, layer: int, kind: str) -> _Interval:
    return event["ts"], event["ts"] + event["dur"], layer, kind


def _correlation(event: dict) -> object:
    return event.get("args", {}).get("correlation", id(event))


def _seconds(intervals: Iterable[_Interval]) -> dict[str, float]:
    """Seconds by kind: a moment counts for the lowest layer that covers it, and there for the interval that began first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    to_come = sorted(intervals, reverse=True)
    running: list[tuple[int, float, float, str]] = []
    for now, then in pairwise(sorted({moment for interval in to_come for moment in interval[:2]})):
        while to_come and to_come[-1][0] <= now:
            begin, end, layer, kind = to_come.pop()
            heapq.heappush(running, (layer, begin, -end, kind))
        while running and -running[0][2] <= now:
            heapq.heappop(running)
        if running:
            seconds[running[0][3]] += (then - now) / 1e6
    return dict(seconds)


def _name_around(event: dict, others: list[dict]) -> str | None:
    """The name of the first of `others` that was running when the event began."""
    began = event.get("ts", -1.0)
    return next((e["name"] for e in others if e["ts"] <= began <= e["ts"] + e["dur"]), None)
