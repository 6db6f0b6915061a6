"""Record a step with PyTorch's profiler, and add up where the step's time goes.

On a GPU each moment counts once: for the kernel that runs, else for a transfer of weights, else the GPU waits. Without a GPU
it counts for the innermost operator of the sampler's thread.
"""

from __future__ import annotations

import bisect
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# One step to start the profiler, whose first events come late, and the one that is recorded.
TRACE_STEPS = 2
FUSED, ATTENTION, PRODUCTS, CONVOLUTIONS, OTHER = "fused", "attention", "products", "convolutions", "other"
TRANSFERS, WAITING = "transfers", "waiting"
# In the names of kernels and operators, in lower case; the first match wins. Names of fused kernels hold what is around them.
KINDS = {
    FUSED: re.compile(r"^triton_(?!tem_)"),
    ATTENTION: re.compile(r"fmha|flash|attention|attn|sdpa|sage_|softmax"),
    CONVOLUTIONS: re.compile(r"conv(?!ert)|fprop|winograd|implicit_gemm|nchwtonhwc|nhwctonchw"),
    PRODUCTS: re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|wgmma|matmul|triton_tem_|cijk_|::linear|mm$|_mm"),
}
UNCOMPILED = "uncompiled "  # before the name of blocks whose compiling has failed (compile/compiled_code.py, `run_eager`)
_COMPILED = "Torch-Compiled Region"
_TRANSFER = re.compile(r"htod|dtoh|hosttodevice|devicetohost|m2d|d2m", re.IGNORECASE)
# If transfers take this share of a step, the step cannot get much shorter, whatever runs beside them.
_SATURATED = 0.8


@dataclass(frozen=True)
class StepProfile:
    """Where the time of one step goes."""

    span: float
    seconds: dict[str, float]  # by kind; blocks whose compiling has failed are kinds of their own
    compiled: float = 0.0  # of these, in compiled blocks or in CUDA graphs
    transferring: float = 0.0  # also beside kernels
    transferred: int = 0  # bytes
    on_gpu: bool = True

    def of_step(self, step: float) -> dict[str, float]:
        """Seconds by kind of a step of `step` seconds, which was not slowed down by the profiler, as launching is."""
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
    return {"cuda": "CUDA kernels", "xpu": "XPU kernels"}.get(device.type, "operators")


def events_of(path: Path) -> list[dict]:
    """The events of a trace that last."""
    with open(path, encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def count(events: list[dict], device: torch.device) -> int:
    """Kernels of a trace, or without an accelerator its operators, with those inside others."""
    wanted = "kernel" if device.type in ("cuda", "xpu") else "cpu_op"
    return sum(event.get("cat") == wanted for event in events)


def profile_of(events: list[dict]) -> StepProfile | None:
    """Where the time goes in the step that `events` record; None if it is not among them."""
    operators = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    step = next((event for event in operators if event["name"].startswith("ProfilerStep")), None)
    if step is None:
        return None
    operators.remove(step)
    regions = _outermost(event for event in operators if event["name"].startswith(_COMPILED))
    failed = _outermost(event for event in operators if event["name"].startswith(UNCOMPILED))
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return _on_gpu(events, work, step, regions, failed) if work else _on_cpu(operators, step, regions)


def _on_gpu(events: list[dict], work: list[dict], step: dict, regions: list[dict], failed: list[dict]) -> StepProfile:
    launches = {_correlation(e): e for e in events if e.get("cat", "").endswith(("runtime", "driver"))}
    kernels, transfers, transferred, compiled = [], [], 0, 0.0
    for event in work:
        launch = launches.get(_correlation(event))
        if event["cat"] == "gpu_memcpy" and _TRANSFER.search(event["name"]):
            transferred += event.get("args", {}).get("bytes", 0)
            # From memory that is not pinned the CPU copies, and launches nothing meanwhile.
            transfers += [(*_times(e), TRANSFERS) for e in (event, launch) if e is not None]
            continue
        block = _around(failed, launch)
        kernels.append((*_times(event), kind_of(event["name"]) if block is None else block["name"]))
        if _around(regions, launch) is not None or (launch is not None and "GraphLaunch" in launch["name"]):
            compiled += event["dur"] / 1e6
    seconds = _seconds(kernels, transfers, [(*_times(step), WAITING)])
    busy = sum(_seconds(kernels).values())
    return StepProfile(step["dur"] / 1e6, seconds, min(compiled, busy), sum(_seconds(transfers).values()), transferred)


def _on_cpu(operators: list[dict], step: dict, regions: list[dict]) -> StepProfile:
    """Without a GPU: of the thread that samples, and not of the thread that compiles."""
    start, end = _times(step)
    here = [e for e in operators if e["tid"] == step["tid"] and start <= e["ts"] <= end]
    kinds = [(*_times(e), e["name"] if e["name"].startswith(UNCOMPILED) else kind_of(e["name"])) for e in here]
    compiled = [(*_times(e), FUSED) for e in regions if e["tid"] == step["tid"]]
    others = [interval for interval in kinds if interval[2] == OTHER]
    named = [interval for interval in kinds if interval[2] != OTHER]
    seconds = _seconds(named, compiled, others, [(start, end, WAITING)])
    return StepProfile((end - start) / 1e6, seconds, sum(_seconds(compiled).values()), on_gpu=False)


def _times(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _correlation(event: dict) -> object:
    return event.get("args", {}).get("correlation", id(event))


def _seconds(*layers: list[tuple[float, float, str]]) -> dict[str, float]:
    """Seconds by kind of intervals: a moment counts for the first layer that covers it, and there for the one that began first.

    Layers but the first are of one kind.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    intervals: list[tuple[float, float, str]] = []
    for layer in layers:
        intervals += layer
        covered, total, before = 0.0, 0.0, sum(seconds.values())
        for start, end, kind in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            added = max(0.0, end - max(start, covered)) / 1e6
            covered, total = max(covered, end), total + added
            if layer is layers[0]:
                seconds[kind] += added
        if layer and layer is not layers[0]:
            seconds[layer[0][2]] += total - before
    return dict(seconds)


def _outermost(events: Iterable[dict]) -> list[dict]:
    """Those that are in no other one, by their begin."""
    outermost: list[dict] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if not outermost or event["ts"] >= _times(outermost[-1])[1]:
            outermost.append(event)
    return outermost


def _around(outermost: list[dict], event: dict | None) -> dict | None:
    """The one in whose time `event` began."""
    if event is None:
        return None
    at = bisect.bisect_right(outermost, event["ts"], key=lambda e: e["ts"]) - 1
    return outermost[at] if at >= 0 and event["ts"] <= _times(outermost[at])[1] else None
