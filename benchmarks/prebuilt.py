"""Measure code compiled without a GPU: one server compiles, the next loads prebuild.py's files before its first prompt.

    python -m benchmarks.prebuilt --host COMFYUI --out FILE [--cases flux flux-scaled sdxl z_image]

prebuild.py runs on the same machine with the GPU hidden, and knows the GPU's description only. A row is a model on one server:
`seconds` of the first prompt; `step`, the median of later prompts' steps; `compiled`, the number of graphs compiled there;
`beside_gib`, the memory of the server's child processes. `error` is the distance between the two servers' last latents. The
first server compiles before its first image, so that its last steps run compiled; the second has default settings.
`used_after`: how many steps after a server's last trace all blocks ran compiled.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from .sessions import KEPT, SESSIONS, Bench, OutOfTimeError, Prompt, arguments, graph, parse

CASES = ("flux", "flux-scaled", "sdxl", "z_image")
TINY = ("flux_small",)
SETTINGS = {"made there": {"compile_when": "before first image"}, "prebuilt": {}}
PROMPTS = 4


def steps_until_used(prompts: list[dict]) -> int | None:
    """Steps from the last one that traced a block to the first later one without an uncompiled block; None if there is none."""
    counts = [pair for taken in prompts for pair in zip(taken["traced"], taken["uncompiled"], strict=True)]
    last = max((at for at, (traced, _) in enumerate(counts) if traced), default=None)
    if last is None:
        return None
    return next((at - last for at, (_, uncompiled) in enumerate(counts) if at > last and not uncompiled), None)


class Prebuilt(Bench):
    """`workflows`: case -> file with the prompt for prebuild.py; `results`: the folder of these, cache files and latents."""

    def __init__(self, options):
        super().__init__(options, "prebuilt")
        self.results = self.base / "prebuilt"
        shutil.rmtree(self.results, ignore_errors=True)
        self.results.mkdir()
        self.workflows: dict[str, Path] = {}

    def prompts(self, server, case: str, kind: str) -> None:
        """Run a case's prompts on one server, and add its row."""
        model, _, weights = case.partition("-")
        info, rows = server.get("/object_info"), []
        for number in range(1, PROMPTS + 1):
            nodes = graph(model, Prompt("next seed"), number, "ours", info, SETTINGS[kind], weights or "default")
            if case not in self.workflows:
                self.workflows[case] = self.results / f"{case}.json"
                self.workflows[case].write_text(json.dumps(nodes))
            rows.append(self.run(server, nodes))
        row = {"kind": "prebuilt", "model": model, "weights": weights or "default", "code": kind, "prompts": rows}
        row["settings"] = SETTINGS[kind]
        if not any("died" in taken for taken in rows):
            row["seconds"] = rows[0]["seconds"]
            row["step"] = round(statistics.median(step for taken in rows[1:] for step in taken["steps"][1:]), 5)
            row["used_after"] = steps_until_used(rows)
            row["beside_gib"] = max(taken["beside_gib"] for taken in rows)
            models = server.get("/torch-compile-kit/report")["models"]
            row["compiled"] = models[-1]["graphs"] - models[-1]["graphs_from_disk"]
            latent = str(self.results / f"{case}.pt")
            if os.path.exists(latent):
                row["error"] = server.post("/session/latent", {"file": latent, "compare": True})["error"]
            else:
                server.post("/session/latent", {"file": latent})
        self.known["rows"].append(row)
        self.save()
        print(json.dumps({key: value for key, value in row.items() if key != "prompts"}), flush=True)

    def prebuild(self) -> list[Path]:
        """Run prebuild.py for all cases in parallel; returns the cache files."""
        card, base = self.results / "card.json", self.folder("ours")
        command = [sys.executable, str(base / "custom_nodes" / "torch-compile-kit" / "prebuild.py")]
        which = ["--gpu", "h100"] if self.options.tiny else ["--gpu-file", str(card)]
        if not self.options.tiny:
            subprocess.run([*command, "--describe-gpu", str(card)], check=True)
        running = {}
        for case, workflow in self.workflows.items():
            out, user = workflow.with_suffix(".tckcache"), self.results / case
            user.mkdir()
            arguments = [str(workflow), *which, "--out", str(out), "--comfyui", self.options.host, "--"]
            arguments += ["--base-directory", str(base), "--user-directory", str(user), "--disable-api-nodes"]
            arguments += ["--front-end-root", str(self.base / "page")]
            hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            with open(workflow.with_suffix(".log"), "w") as log:
                running[out] = subprocess.Popen([*command, *arguments], env=hidden, stdout=log, stderr=subprocess.STDOUT)
        try:
            for out, process in running.items():
                if process.wait(self.left()):
                    print(out.with_suffix(".log").read_text()[-2000:], flush=True)
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        finally:
            for process in running.values():
                process.kill()
        return [out for out in running if out.exists()]

    def measure(self, cases) -> None:
        for case in cases:
            model, _, weights = case.partition("-")
            self.make_files(SESSIONS[model].model or model, [weights or "default"])
        files: list[Path] = []
        for kind in ("made there", "prebuilt"):
            self.clear(*KEPT)
            folder = self.folder("ours") / "user" / "torch-compile-kit"
            folder.mkdir(parents=True)
            for file in files:
                shutil.copy(file, folder)
            with self.server("ours") as server:
                for file in files:
                    print(server.post("/torch-compile-kit/cache/load", {"file": file.name})["text"], flush=True)
                for case in cases:
                    self.left()
                    self.prompts(server, case, kind)
            files = files or self.prebuild()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", help="sessions of sessions.py, with a format of weights: flux-scaled")
    options = parse(parser)
    try:
        Prebuilt(options).measure(options.cases or (TINY if options.tiny else CASES))
    except OutOfTimeError:
        print(f"stopped by --limit {options.limit:g}; what there is is in {options.out}", flush=True)


if __name__ == "__main__":
    main()
