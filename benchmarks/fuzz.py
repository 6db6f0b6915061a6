"""Random prompts for a real server on the CPU: wrong values in every input of every node, and what became of them.

    python -m benchmarks.fuzz --host COMFYUI --out FILE [--prompts 300] [--seed 1] [--only 17 42]

Ends with 1 where an answer was wrong: a traceback of ours, an error without an input's name, too much log, a dead server.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from devtools.fuzzing import Fuzz, run_normal
from devtools.server import ROOT, Server

from . import results

# Between these all is well, or it is known since when it is not.
EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--only", type=int, nargs="+", help="these numbers only, without a results file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="without inductor")
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as base:
        (Path(base) / "custom_nodes").mkdir()
        shutil.copy(ROOT / "tests" / "tiny_nodes.py", Path(base) / "custom_nodes")
        environment = {"TINY_MODELS": str(ROOT / "devtools" / "tiny_models.py")}
        with Server(options.host, base, environment=environment) as server:
            fuzz, normal, began = Fuzz(server, options.seed, options.quick), [], time.perf_counter()
            numbers = options.only or range(options.prompts)
            try:
                for at, number in enumerate(numbers, 1):
                    fuzz.run([number], lambda row: print(row, flush=True))
                    if at % EVERY == 0 or at == len(numbers):
                        normal.append(run_normal(fuzz))
                        print("a normal prompt:", normal[-1] or "ran", flush=True)
            finally:
                shutil.copy(server.log_file, Path(tempfile.gettempdir()) / "fuzz-server.log")
            seconds, alive = time.perf_counter() - began, server.process.poll() is None
    counts = Counter(row["outcome"] for row in fuzz.rows)
    print(dict(counts))
    if options.out:
        where = results.environment(options.host, "fuzz")
        row = {
            "kind": "fuzz",
            "seed": options.seed,
            "prompts": len(fuzz.rows),
            "outcomes": dict(counts.most_common()),
            "wrong": fuzz.wrong(),
            "normal_prompts": f"{normal.count('')} of {len(normal)} ran",
            "server_alive": alive,
            "most_log_bytes_of_what_ran": max((r["log_bytes"] for r in fuzz.rows if r["outcome"] == "ran"), default=0),
            "longest_seconds": max(r["seconds"] for r in fuzz.rows),
            "seconds": round(seconds),
        }
        results.save(options.out, {"environments": [where], "rows": [row, *({"kind": "fuzz_prompt", **r} for r in fuzz.rows)]})
    if fuzz.wrong() or any(normal) or not alive:
        sys.exit(1)


if __name__ == "__main__":
    main()
