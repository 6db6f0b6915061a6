"""Cancel a warmup of three sizes on a real server while it compiles: how long until the prompt is over, and is all well after?

    python -m benchmarks.cancel --host COMFYUI

The shipped workflow with a tiny Flux is cancelled once in each of its first graphs, then run to its end.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from devtools import inprocess, prompts
from devtools.server import ROOT, Server, error_of, outputs_of

SIZES = "320x256\n256x320"
CANCELS = 2
# Into the graph: it must not end before the server has been told.
LATER = 0.3


class Clock:
    """What benchmarks/compile_clock.py has written down: begin and end of each compilation, in seconds since 1970."""

    def __init__(self, file: Path):
        self._file = file
        file.touch()

    def graphs(self) -> list[list[float]]:
        """[begin] of the one in work, [begin, end] of the others."""
        found = []
        for line in self._file.read_text().splitlines():
            what, seconds = line.split()
            if what == "begin":
                found.append([])
            found[-1].append(float(seconds))
        return found


def cancel(server: Server, clock: Clock, prompt: dict) -> dict | None:
    """Cancel the prompt in its first graph; None when it is over without one.

    Raises:
        RuntimeError: it was not cancelled.
    """
    before = len(clock.graphs())
    number = server.start(prompt)
    while len(clock.graphs()) == before:
        if number in server.get(f"/history/{number}"):
            return None
        time.sleep(0.02)
    time.sleep(LATER)
    pressed = time.time()
    server.interrupt()
    messages = server.finished(number)["status"]["messages"]
    over = next((data["timestamp"] / 1000 for kind, data in messages if kind == "execution_interrupted"), None)
    if over is None:
        raise RuntimeError(f"the warmup was not cancelled: {messages}")
    graphs = clock.graphs()
    in_work = next(graph for graph in graphs[before:] if graph[1] > pressed)
    return {
        "kind": "cancel",
        "model": "tiny Flux",
        "graph_seconds": round(in_work[1] - in_work[0], 3),
        "until_the_graph_ended": round(in_work[1] - pressed, 3),
        "after_the_graph": round(over - in_work[1], 3),
        "graphs_begun_after_cancel": sum(graph[0] > pressed for graph in graphs),
    }


def measure(server: Server, clock: Clock) -> list[dict]:
    import safetensors.torch

    prompt = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), 256, 256, steps=4)
    prompt = prompts.change(prompt, prompts.WARMUP_NODE, extra_sizes=SIZES)
    warmup = prompts.only_warmup(prompt)
    rows = []
    for _ in range(CANCELS):
        if (row := cancel(server, clock, warmup)) is None:
            break
        rows.append(row)
    latents = []
    cancelled = len(clock.graphs())
    for variant in (prompt, prompts.without_kit(prompt)):
        entry = server.queue(prompts.with_latent(variant, "cancel"))
        if error := error_of(entry):
            raise RuntimeError(f"the run after the cancelled ones failed: {error['exception_message']}")
        (name,) = outputs_of(entry, "latents")
        latents.append(safetensors.torch.load_file(server.base / "output" / name)["latent_tensor"])
    ours, eager = latents
    error = float((ours - eager).norm() / eager.norm())
    rows.append(
        {
            "kind": "cancel",
            "model": "tiny Flux",
            "run": "after the cancelled ones",
            "graphs": len(clock.graphs()) - cancelled,
            "error": float(f"{error:.4g}"),
        }
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    os.environ["COMFYUI_PATH"] = str(Path(options.host).resolve())
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-cancel-", ignore_cleanup_errors=True) as base:
        inprocess.enter_host(base)
        inprocess.write_models(base, ["flux", "clip_l", "flux_vae"])
        (Path(base) / "custom_nodes").mkdir(exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / "compile_clock.py", Path(base) / "custom_nodes")
        clock = Clock(Path(base) / "clock.txt")
        environment = {"COMPILE_CLOCK": str(Path(base) / "clock.txt")}
        with Server(inprocess.host_folder(), base, inprocess.has_gpu(), environment=environment) as server:
            for row in measure(server, clock):
                print("ROW", json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
