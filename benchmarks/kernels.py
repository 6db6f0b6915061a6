"""Profile where the time of a step goes: the kernels of one eager and one compiled step, by kind.

    python -m benchmarks.kernels --host COMFYUI --model flux [--out FILE]

Needs a CUDA device. The floor that it prints is what the matrix products and the attention of ours take alone: compiling can
remove everything else at most.
"""

import argparse
import json
import os
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from . import host, models, results

# First match wins: a kernel's name holds one of the words.
KINDS = {
    "compiled elementwise": ("triton_",),  # first: their names tell of what is around them
    "attention": ("fmha", "flash", "attention", "sdpa", "softmax"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "wgmma"),
    "convolutions": ("conv", "implicit", "winograd"),
    "copies": ("memcpy", "memset", "copy"),
}
LONGEST = 12


def group_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), "other elementwise")


def kernels_of(patcher, name: str) -> list[tuple[str, float, float]]:
    """(name, start, duration) in seconds of every kernel of one warm step."""
    import torch

    trace = host.kit("benchmark.step_profile")
    host.sample(patcher, name, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with trace.step_trace(path, torch.device("cuda")) as recorder:
            host.sample(patcher, name, trace.TRACE_STEPS, after_step=recorder.step)
        events = json.loads(path.read_text())["traceEvents"]
    wanted = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") in wanted]


def summary(kernels: list[tuple[str, float, float]]) -> dict:
    """Seconds by kind, the time in which no kernel ran, and the kernels that took longest."""
    by_kind, by_name, calls = defaultdict(float), defaultdict(float), Counter()
    busy, end = 0.0, 0.0
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        by_kind[group_of(name)] += duration
        by_name[name] += duration
        calls[name] += 1
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    span = end - min(start for _, start, _ in kernels)
    longest = sorted(by_name, key=by_name.get, reverse=True)[:LONGEST]
    return {
        "kernels": len(kernels),
        "span": round(span, 5),
        "idle": round(span - busy, 5),
        "seconds": {kind: round(seconds, 5) for kind, seconds in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [{"name": name[:110], "calls": calls[name], "seconds": round(by_name[name], 5)} for name in longest],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--out", type=Path, help="rows are added to those that are there")
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--settings", type=json.loads, default={}, help="inputs of Torch Compile, as JSON")
    options = parser.parse_args()
    options.settings = {"compile_when": "before first image", **options.settings}
    environment = results.environment(options.host, "kernels")
    host.enter(options.host)
    patcher, rows = models.build(options.model, host.device()), []
    for variant in ("eager", "ours"):
        found = summary(kernels_of(host.apply(variant, patcher, **options.settings), options.model))
        row = {"kind": "kernels", "model": options.model, "variant": variant, "settings": options.settings, **found}
        if variant == "ours":
            needed = ("matrix products", "attention", "convolutions")
            row["floor"] = round(sum(found["seconds"].get(kind, 0.0) for kind in needed), 5)
        print("ROW", json.dumps(row), flush=True)
        rows.append(row)
    if options.out:
        run = results.load(options.out)
        run["environments"].append(environment)
        run["rows"] += rows
        results.save(options.out, run)
    os._exit(0)


if __name__ == "__main__":
    main()
