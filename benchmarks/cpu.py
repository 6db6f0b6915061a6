"""The readings that need no GPU, in one command: small models, some minutes on two cores.

    python -m benchmarks.cpu --host COMFYUI [--kjnodes FILE] --out benchmarks/results/cpu-DATE.json

Step time of every variant beside eager in the same process; compile seconds of a first start, of a restart and of an empty
machine that is given the cache file; cancel on a real server.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from . import run

MODELS = ("flux_small", "sdxl_small")
STARTS = ("first", "second", "carried")
LIMIT = 600
# On shared cores two threads wait for each other, and a step may take ten times as long.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NOTE = (
    "one thread a process; rows of the same `process` took turns in one process with an empty cache; the starts of a restart "
    "are processes that share a user folder, `carried` has one with nothing but the cache file"
)


def jobs(options) -> list[tuple[str, list[str]]]:
    """(kind of the rows, command) of every process."""
    python = [sys.executable, "-m"]
    host = ["--host", options.host]
    found = []
    for model in MODELS:
        for variant in ("ours", "core", "kjnodes"):
            more = ["--noise"] if variant == "ours" else []
            if variant == "kjnodes":
                if not options.kjnodes:
                    continue
                more = ["--kjnodes", options.kjnodes]
            command = ["--model", model, "--variant", "eager", variant, "--steps", "3", "--rounds", "3", *more]
            found.append(("cpu_step_time", [*python, "benchmarks.step_time", *host, *command]))
    for model in MODELS:
        command = ["--model", model, "--steps", "2", "--runs", *STARTS]
        found.append(("cpu_restart", [*python, "benchmarks.restart", *host, *command]))
    return [*found, ("cpu_cancel", [*python, "benchmarks.cancel", *host])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes", help="nodes/model_optimization_nodes.py of KJNodes; without it its rows are left out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(ONE_THREAD, CUDA_VISIBLE_DEVICES="")
    load, began, rows = os.getloadavg()[0], time.perf_counter(), []
    for process, (kind, command) in enumerate(jobs(options), 1):
        # A restart is about the cache that the pack keeps itself.
        made = run.run(command, LIMIT, own_cache=kind != "cpu_restart")
        if not made:
            raise SystemExit(f"no result: {' '.join(command)}")
        rows += [{**row, "kind": kind, "process": process} for row in made]
    where = run.environment(options.host, "benchmarks.cpu")
    where |= {"rows": NOTE, "load_before": round(load, 2), "seconds": round(time.perf_counter() - began)}
    options.out.write_text(json.dumps({"environments": [where], "rows": rows}, indent=1) + "\n")
    print(f"{options.out}: {len(rows)} rows in {where['seconds']} s")


if __name__ == "__main__":
    main()
