"""Where a cold start goes: the phases of compiling in a first step with nothing on disk, as PyTorch itself notes them.

    python -m benchmarks.cold --host COMFYUI --model flux --head-start 4

A phase's seconds are its own, without the phases inside it. `tuning` is when new kernels run first and are
measured; `outside` is what remains: the choice of an attention kernel, code that the GPU's driver loads.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from . import models, session, variants

TRACES = "TORCH_TRACE"
PAYLOAD = '"chromium_event"'
COMPILATION, TUNING = "dynamo", "CachingAutotuner.benchmark_all_configs"
SHORT = 0.05


def phases(folder: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    """From PyTorch's trace (torch/_dynamo/utils.py, ChromiumEventLogger).

    Returns:
        Own seconds of each phase inside compilations, and the seconds of everything outermost by its name.
    """
    own: dict[str, float] = defaultdict(float)
    outermost: dict[str, list[float]] = defaultdict(list)
    inside: dict[str, float] = defaultdict(float)
    open_phases: list[list] = []
    for event in _events(folder):
        if event["ph"] == "B":
            open_phases.append([event["name"], event["ts"], 0.0])
            continue
        while any(name == event["name"] for name, _, _ in open_phases):  # a phase that failed has no end
            name, began, inner = open_phases.pop()
            took = (event["ts"] - began) / 1e6
            inside[name] += took - inner
            if open_phases:
                open_phases[-1][2] += took
            else:
                outermost[name].append(took)
                if name == COMPILATION:  # not the preparation, in its thread
                    for phase, seconds in inside.items():
                        own[phase] += seconds
                inside.clear()
            if name == event["name"]:
                break
    return own, outermost


def _events(folder: Path) -> list[dict]:
    found = []
    for file in folder.glob("*.log"):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if PAYLOAD in line:
                end = number + 1
                while end < len(lines) and lines[end].startswith("\t"):
                    end += 1
                found.append(json.loads("\n".join(lines[number + 1 : end])))
    return [event for event in found if event.get("ph") in "BE"]


def measure(options, traces: Path) -> dict:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = json.loads(options.settings)
    patcher = models.build(options.model, device)
    session.sample(variants.apply("eager", patcher, session.KIT), options.model, 2)
    model = variants.apply("ours", patcher, session.KIT, **settings)
    time.sleep(options.head_start)
    _, first = session.sample(model, options.model, 4)
    own, outermost = phases(traces)
    step = session.median(session.sample(model, options.model, 6)[1][1:])
    cold = first[0] - step
    report = import_module(f"{session.KIT}.engine.notices.report").report_json()["models"][0]
    return {
        "kind": "cold start",
        "model": options.model,
        "settings": settings,
        "head_start": options.head_start,
        "cold_start": round(cold, 2),
        "graphs": session.counts()["graphs"],
        "compile_seconds": report["compile_seconds"],
        "tuning": round(sum(outermost[TUNING]), 2),
        "outside": round(cold - sum(outermost[COMPILATION] + outermost[TUNING]), 2),
        "each_graph": [round(seconds, 2) for seconds in outermost[COMPILATION]],
        "phases": {name: round(s, 2) for name, s in sorted(own.items(), key=lambda item: -item[1]) if s >= SHORT},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--head-start", type=float, default=4.0, help="seconds between node and sampler: text encoding")
    options = parser.parse_args()
    if TRACES not in os.environ:  # PyTorch reads it when it is imported
        with tempfile.TemporaryDirectory() as folder:
            places = {TRACES: f"{folder}/traces", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t"}
            again = [sys.executable, "-m", "benchmarks.cold", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env={**os.environ, **places}).returncode)
    session.enter(options.host)
    print("ROW", json.dumps(measure(options, Path(os.environ[TRACES]))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
