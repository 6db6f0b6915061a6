"""What the thread that compiles costs a host that launches many small kernels, on the CPU.

    python -m benchmarks.contention --out benchmarks/results/NAME.json

A model of many small layers runs over and over, as an eager step of SDXL does; meanwhile code is made in the background for
another: without a gate (`open`), as it is (`gate`), and not at all (`alone`). Each in a process of its own, with a cold cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("alone", "gate", "open")
SECONDS, WARM = 60.0, 50


def measure(way: str) -> dict:
    """Milliseconds of a call of the host's model until the code is there, and when that was."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch
    from support import Net

    from engine.background.gate import gate
    from engine.background.model_call import ModelCall
    from engine.background.thread import compiler
    from engine.compile.binding import compiled_blocks
    from engine.compile.events import watching
    from engine.settings import CompileSettings

    torch.set_num_threads(1)
    gate.is_busy = lambda: True
    host, net, x = Net(count=40), Net(), torch.randn(2, 4, 8)
    times, made_after = [], None
    with torch.inference_mode(), watching:
        for _ in range(WARM):
            host(x)
        gate.close()
        if way == "open":
            gate.open()
        if way != "alone":
            with compiled_blocks(net, CompileSettings(), ModelCall(waits=False)):
                net(x)
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            start = time.perf_counter()
            host(x)
            times.append(time.perf_counter() - start)
            if way != "alone" and not compiler.busy:
                made_after = round(time.perf_counter() - began, 1)
                break
    times.sort()
    return {
        "kind": "contention",
        "way": way,
        "mean_ms": round(1000 * sum(times) / len(times), 2),
        "median_ms": round(1000 * times[len(times) // 2], 2),
        "p95_ms": round(1000 * times[int(0.95 * len(times))], 2),
        "seconds_until_code": made_after,
        "calls": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help="measure one, in this process")
    options = parser.parse_args()
    if options.way:
        print("ROW", json.dumps(measure(options.way)), flush=True)
        os._exit(0)
    rows = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.contention", "--way", way],
                cwd=ROOT, env=own, capture_output=True, text=True, check=False,
            )  # fmt: skip
        found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if not found:
            sys.exit(done.stderr[-2000:])
        rows.append(json.loads(found[0][4:]))
        print(rows[-1], flush=True)
    if options.out:
        import torch

        from .run import cpu_name

        of = {
            "date": time.strftime("%Y-%m-%d"),
            "device": cpu_name(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "comfyui": "none",
            "command": f"python -m benchmarks.contention --out {options.out}",
        }
        options.out.write_text(json.dumps({"environments": [of], "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
