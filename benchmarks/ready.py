"""Measure how long compiled code takes to be ready, and what steps cost until then, on a real server with default flags.

    python -m benchmarks.ready --host COMFYUI --models flux sdxl --packs CHECKOUT OLDER_CHECKOUT --out FILE

For each model and checkout a server with empty caches: prompts without the node until the weights are loaded, then prompts with
the node until its code is ready and has been used; then the server is started anew and the prompt runs once more. The report of
the pack is asked four times a second for what is being compiled, the system for processes of the pack and their memory.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from real_sessions import Session  # noqa: E402

from devtools.server import ServerError  # noqa: E402

from . import results  # noqa: E402
from .sessions import Prompt  # noqa: E402

EAGER, MOST, AFTER = 3, 14, 2


class Watch(threading.Thread):
    """Note when the pack begins and ends to compile, and what its process takes."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.began, self.ready, self.rss, self.vram, self.pids = server, None, None, 0, 0, set()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.25):
            try:
                models = self.server.get("/torch-compile-kit/report")["models"]
            except Exception:
                continue
            busy, now = any(model["being_compiled"] for model in models), time.monotonic()
            self.began = self.began or (now if busy else None)
            self.ready = None if busy or self.began is None else (self.ready or now)
            self._look_at_processes()

    def _look_at_processes(self):
        listed = subprocess.run(["ps", "-eo", "pid,ppid,rss,args"], capture_output=True, text=True).stdout.splitlines()[1:]
        rows = [line.split(None, 3) for line in listed]
        mine = {row[0]: int(row[2]) for row in rows if len(row) == 4 and "compile_process/child.py" in row[3]}
        roots = {row[0] for row in rows if row[0] in mine and row[1] not in mine}
        self.pids |= roots
        self.rss = max(self.rss, sum(mine[pid] for pid in roots) / 2**20)
        try:
            command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
            apps = subprocess.run(command, capture_output=True, text=True).stdout
        except OSError:
            return
        used = dict(line.split(", ") for line in apps.splitlines() if ", " in line)
        self.vram = max([self.vram, *(int(used[pid]) for pid in mine if pid in used)])


def measured(options, model, pack, cores):
    base = options.folder / f"{model}-{pack.name}-{cores}"
    settings = SimpleNamespace(
        host=options.host, model=model, folder=base, pack=pack, settings={}, weights="default", cpu=options.cpu,
        kernel="", prompt_limit=240,
    )  # fmt: skip
    session = Session(settings)
    models = options.folder / "models" / model
    models.mkdir(parents=True, exist_ok=True)
    if not (base / "models").exists():
        (base / "models").symlink_to(models)
    if not any(models.iterdir()):
        session.write_weights()
    row = {"kind": "ready", "model": model, "pack": pack.name, "cores": cores, "prompts": [], "restart": []}
    with running(session, cores) as (server, prompt):
        eager = [prompt(False) for _ in range(EAGER)]
        row["eager"] = {"prompt": eager[-1]["seconds"], "step": median(eager[-1]["steps"] + eager[-2]["steps"])}
        watch = Watch(server)
        watch.start()
        after = 0
        for _ in range(MOST):
            beside = watch.ready is None
            row["prompts"].append({**prompt(True), "beside": beside})
            if watch.began is None:
                session.compile_now(server)
            after += watch.ready is not None and not beside
            if after == AFTER:
                break
        watch.over.set()
        watch.join()
        row |= {"ready_after": watch.ready and round(watch.ready - watch.began, 1), "rss_gib": round(watch.rss, 2)}
        row |= {"vram_mib": watch.vram, "processes": len(watch.pids)}
        beside = [step for p in row["prompts"] if p["beside"] for step in p["steps"][1:]]
        row["step_beside"], row["step_after"] = median(beside), median(row["prompts"][-1]["steps"])
    with running(session, cores) as (server, prompt):
        watch = Watch(server)
        watch.start()
        row["restart"] = [prompt(True), prompt(True)]
        watch.over.set()
        watch.join()
        row["processes_after_restart"] = len(watch.pids)
    return row


def median(numbers):
    return round(sorted(numbers)[len(numbers) // 2], 4) if numbers else None


class running:  # noqa: N801  used as a function
    """A server with the session's folders, on the first `cores` cores (0: all), and a function that runs a prompt on it."""

    def __init__(self, session, cores):
        self.session, self.launcher = session, ("taskset", "-c", f"0-{cores - 1}") if cores else ()

    def __enter__(self):
        self.server = self.session.server()
        if self.launcher:
            pid = str(self.server.process.pid)
            subprocess.run([*self.launcher[:2], "-p", self.launcher[2], pid], check=False, capture_output=True)
            subprocess.run(["taskset", "-a", "-cp", self.launcher[2], pid], check=False, capture_output=True)
        self.server.wait_until_ready()
        self.session.info = self.server.get("/object_info")
        self.number = 0
        return self.server, self.prompt

    def prompt(self, compiled):
        self.number += 1
        nodes = self.session.graph(self.number, Prompt("again"), compiled)
        began = time.monotonic()
        self.session.sampled(self.server, nodes, "again")
        seconds = round(time.monotonic() - began, 2)
        samplings = self.server.get("/session/steps")["samplings"]
        line = next(iter(self.server.get("/torch-compile-kit/status").values()), None) if compiled else None
        return {"seconds": seconds, "steps": [round(step, 4) for sampling in samplings for step in sampling], "line": line}

    def __exit__(self, *_error):
        self.server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--models", nargs="+", default=["flux", "sdxl"])
    parser.add_argument("--packs", nargs="+", type=Path, default=[ROOT])
    parser.add_argument("--cores", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kit-ready"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    rows = []
    for cores in options.cores:
        for model in options.models:
            for pack in options.packs:
                try:
                    rows.append(measured(options, model, pack.resolve(), cores))
                except ServerError as error:
                    rows.append({"kind": "ready", "model": model, "pack": pack.name, "cores": cores, "error": str(error)[:300]})
                print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("prompts", "restart")}), flush=True)
                print([p["seconds"] for p in rows[-1].get("prompts", [])], [p["seconds"] for p in rows[-1].get("restart", [])])
                where = results.environment(options.host, "ready")
                results.save(options.out, {"environments": [where], "rows": rows})


if __name__ == "__main__":
    main()
