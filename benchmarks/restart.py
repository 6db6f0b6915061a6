"""What a restart costs: the first step of a model in one process after another, with the disk cache of the one before.

    python -m benchmarks.restart --host COMFYUI --model flux --out FILE

As in a queue, preparing begins when the prompt is queued (nodes/routes.py), and the model is made after that: `head_start` in
the rows is how long that took until sampling began. Random weights are made on the GPU in less time than a user's model is
loaded; with `--file` the host's loader reads them from the file that `python -m benchmarks.low_vram --model flux --make` has
made (in memory, where it can), and puts them on the GPU as it does before the first step.

Runs: `first` compiles; `second` finds all on disk; `early` as well, with some seconds more between the node and the sampling,
as when a text encoder runs between; `carried` starts with an empty cache and the file that `first` saved, `carried early` is
both; `eager` compiles nothing, for what a new process costs by itself. `traced` counts the frames that Dynamo traced, `error`
is the distance of the result from eager's in the same process.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from . import low_vram, models, session, variants

RUNS = ("first", "second", "early", "carried", "carried early", "eager")
HEAD_START = 5.0
FILE = "carried.tckcache"


def measure(options) -> dict:
    import torch
    from torch._dynamo.utils import counters

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    queued = time.perf_counter()
    eager = options.run == "eager"
    settings = json.loads(options.settings)
    if not eager:
        given = import_module(f"{session.KIT}.engine.settings").CompileSettings(**settings)
        import_module(f"{session.KIT}.engine.host.model.user_folder").get_ready(given)
    patcher = _load(options.model) if options.file else models.build(options.model, device)
    files = import_module(f"{session.KIT}.engine.host.nodes.cache_files")
    if options.run.startswith("carried"):
        print(files.load_cache(FILE))
    variant = variants.apply("eager" if eager else "ours", patcher, session.KIT, **settings)
    if options.file:
        _put_on_gpu(variant)
    if options.run.endswith("early"):
        time.sleep(HEAD_START)
    head_start = time.perf_counter() - queued
    if options.profile:
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
    _, first = session.sample(variant, options.model, 4)
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("cumtime").print_stats(90)
        from torch._dynamo.utils import compile_times

        print(compile_times())
    latent, warm = session.sample(variant, options.model, options.steps)
    step = session.median(warm[1:])
    row = {
        "model": options.model,
        "run": options.run,
        "settings": settings,
        "from_file": options.file,
        "head_start": round(head_start, 2),
        "first_step": round(first[0], 3),
        "step": round(step, 5),
        "fastest": round(min(warm[1:]), 5),
        "above": round(first[0] - step, 3),
    }
    if eager:
        return row
    report = import_module(f"{session.KIT}.engine.notices.report").report_json()["models"][0]
    row |= {
        "compile_seconds": report["compile_seconds"],
        "graphs": report["graphs"],
        "graphs_from_disk": report["graphs_from_disk"],
        "traced": counters["frames"]["total"],
        "fxgraph_misses": counters["inductor"]["fxgraph_cache_miss"],
        "autograd_misses": counters["aot_autograd"]["autograd_cache_miss"],
    }
    row["error"] = session.relative_error(latent, session.sample(patcher.clone(), options.model, options.steps)[0])
    if options.run == "first":
        print(files.save_cache(variant, FILE)[1])
    return row


def _load(name: str):
    """As UNETLoader does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(low_vram.weights_file(name)))


def _put_on_gpu(patcher) -> None:
    """What the sampler does before its first step; nothing is left to load in it."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher], memory_required=0)


def run_all(options) -> None:
    with tempfile.TemporaryDirectory() as made:
        user = options.folder or made
        for number, run in enumerate(options.runs):  # a run may be asked for several times
            folder = Path(user) / (f"{run} {number}" if run.startswith("carried") else "own")
            if run.startswith("carried"):
                (folder / "torch-compile-kit").mkdir(parents=True)
                shutil.copy(Path(user) / "own" / "torch-compile-kit" / FILE, folder / "torch-compile-kit")
            command = [sys.executable, "-m", "benchmarks.restart", "--host", options.host, "--model", options.model]
            command += ["--steps", str(options.steps), "--run", run, "--user", str(folder)]
            command += ["--profile"] if options.profile and run != "first" else []
            command += ["--file"] if options.file else []
            command += ["--settings", options.settings]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print("\n".join(done.stdout.splitlines()[-400:]), flush=True)
            rows = [line.removeprefix("ROW ") for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if options.out and rows:
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(rows[-1] + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--runs", nargs="*", default=RUNS, choices=RUNS)
    parser.add_argument("--settings", default='{"compile": "at once"}', help="inputs of Torch Compile Model, as JSON")
    parser.add_argument("--out", help="a file to which rows of JSON are added")
    parser.add_argument("--folder", help="where the user folders of the runs are; a temporary one if not given")
    parser.add_argument("--file", action="store_true", help="load the weights from a file, as ComfyUI does")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--run", choices=RUNS, help="this process is that run")
    parser.add_argument("--user", help="the user folder of that run")
    options = parser.parse_args()
    if options.run is None:
        run_all(options)
        return
    Path(options.user).mkdir(parents=True, exist_ok=True)
    session.enter(options.host)
    import folder_paths

    folder_paths.set_user_directory(options.user)
    logging.getLogger("torch-compile-kit").setLevel(logging.DEBUG)  # says what the preparation took
    began = time.perf_counter()
    row = measure(options)
    row["process_seconds"] = round(time.perf_counter() - began, 1)
    print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
