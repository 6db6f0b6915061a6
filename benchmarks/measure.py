"""Measure one thing on this machine: eager, ours and the peers side by side in one run, whose rows go to a file.

    python -m benchmarks.measure --what low-vram --host COMFYUI --kjnodes FILE --out FILE [--models flux sdxl]
    python -m benchmarks.tables --add FILE

1. `jobs` of a measurement says which processes there are: peers change PyTorch and ComfyUI for good, so each has its own.
2. Each process is this command with `--job`: options of its own. It has a compile cache of its own, as on a new machine.
3. The process prints its rows; a variant that dies is a result. `process` in a row is the number of its process.
Models whose names end in `_small`, and VAEs with `--tiny`, run on the CPU with one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import host, low_vram, models, parts, results

ROW = "ROW "


@dataclass(frozen=True)
class What:
    """A measurement.

    Args:
        kind: of its rows.
        measure: rows of one process; its options have one `model`.
        jobs: options of each process, beyond those of the command.
        defaults: options that the command does not give.
        from_file: it reads the model's weights from a file, which is made before.
        at_once: code is waited for; else it is made in the background, as for users, and `measure` waits between its runs.
    """

    kind: str
    measure: Callable[[argparse.Namespace], Iterator[dict]]
    jobs: Callable[[argparse.Namespace], list[dict]]
    defaults: dict
    from_file: bool = False
    at_once: bool = True


def for_each_model(options: argparse.Namespace) -> list[dict]:
    return [{"model": model} for model in options.models]


WHAT = {
    "low-vram": What(
        "low_vram", low_vram.low_vram, low_vram.low_vram_jobs,
        {"models": ["flux"], "variants": list(host.VARIANTS), "steps": 6, "free": [0, 20, 14, 10, 8]}, from_file=True,
    ),
    "controlnet": What(
        "controlnet_node", parts.controlnet, for_each_model, {"models": ["sdxl", "flux"], "steps": 6}, at_once=False
    ),
    "vae": What(
        "vae", parts.vae, for_each_model,
        {"models": list(parts.LATENTS), "variants": ["eager", "ours", "kjnodes"], "vram": "dynamic"},
    ),
    "training": What(
        "training", parts.training, parts.training_jobs,
        {"models": ["flux", "sdxl"], "variants": ["eager", "ours"], "steps": 6}, at_once=False,
    ),
}  # fmt: skip


def rows_of(command: list[str], limit: float, environment: dict) -> Iterator[dict]:
    """The rows that a process prints, as it prints them; its last lines are printed if it fails."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    timer = threading.Timer(limit, process.kill)
    timer.start()
    lines, failed = [], False
    for line in process.stdout:
        if line.startswith(ROW):
            row = json.loads(line.removeprefix(ROW))
            failed = failed or "died" in row
            print("  ", line.removeprefix(ROW), end="", flush=True)
            yield row
        else:
            lines.append(line)
    timer.cancel()
    if process.wait() or failed:
        print(*lines[-40:], f"ended with {process.returncode}; killed after {limit:g} s if that is -9", sep="", flush=True)


def run_all(options: argparse.Namespace, what: What) -> None:
    """Every process in turn; rows are written after each."""
    content = results.load(options.out)
    small = options.tiny or all(model.endswith("_small") for model in options.models)
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if small else {}
    os.environ.update(on_cpu)
    if what.from_file or options.free is not None:
        for model in options.models:
            command = [sys.executable, "-m", "benchmarks.checkpoints", "--host", options.host, "--model", model]
            subprocess.run([*command, "--folder", str(models.weights_folder()), "--kinds", "diffusion_models"], check=True)
    before = max((row.get("process", 0) for row in content["rows"]), default=0)
    with tempfile.TemporaryDirectory(prefix="kit-measure-") as scratch:
        for process, job in enumerate(what.jobs(options), before + 1):
            print("+", json.dumps(job), flush=True)
            cache = Path(scratch) / str(process)
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, "-m", "benchmarks.measure", *sys.argv[1:]]
            command += ["--job", json.dumps({**job, "scratch": scratch})]
            content["rows"] += [{**row, "process": process} for row in rows_of(command, options.limit, own)]
            if options.out:
                results.save(options.out, content)
    if options.out:  # last: a CUDA context in this process would count as used memory
        content["environments"].append(results.environment(options.host, "measure"))
        results.save(options.out, content)


def rounded(value):
    """Floats of five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return {key: rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def run_job(options: argparse.Namespace, what: What) -> None:
    vars(options).update(options.job)
    if what.at_once:
        options.settings = {"compile_when": "before first image", **options.settings}
    host.enter(options.host, dynamic_vram=options.vram == "dynamic" and os.path.exists("/dev/nvidia0"))
    try:
        for row in what.measure(options):
            print(ROW + json.dumps({"kind": what.kind, "model": options.model, **rounded(row)}), flush=True)
    except Exception as error:  # a variant that dies is a result
        traceback.print_exc()
        row = {"kind": what.kind, "model": options.model, "variant": (options.variants or ["ours"])[-1]}
        print(ROW + json.dumps({**row, "died": f"{type(error).__name__}: {error}"[:300]}), flush=True)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


def parse() -> argparse.Namespace:
    what = argparse.ArgumentParser(add_help=False)
    what.add_argument("--what", required=True, choices=list(WHAT))
    parser = argparse.ArgumentParser(parents=[what], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="folder of ComfyUI")
    parser.add_argument("--kjnodes", help="KJNodes' nodes/model_optimization_nodes.py; without it that variant is left out")
    parser.add_argument("--out", type=Path, help="rows are added to those that are there")
    parser.add_argument("--models", nargs="+", help="names in models.py; of vae those in parts.py")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--settings", type=json.loads, default={}, help="inputs of Torch Compile, as JSON")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a process is killed")
    parser.add_argument("--free", type=float, nargs="+", help="GiB that are left free; low-vram, controlnet. 0: all")
    parser.add_argument("--vram", choices=["dynamic", "legacy"], default="legacy", help="controlnet, vae")
    parser.add_argument("--tiny", action="store_true", help="vae: narrow networks and small latents, for a CPU")
    parser.add_argument("--batch", type=int, default=1, help="training")
    parser.add_argument("--depth", type=int, default=2, help="training: of gradient checkpoints; 0: none")
    parser.add_argument("--size", type=int, help="training: side of the images")
    parser.add_argument("--dtype", default="bf16", help="training")
    parser.add_argument("--bypass", action="store_true", help="training")
    parser.add_argument("--without-cudnn", action="store_true", help="training: with cuDNN's attention eager dies")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    if not {"-h", "--help"} & set(sys.argv):
        parser.set_defaults(**WHAT[what.parse_known_args()[0].what].defaults)
    options = parser.parse_args()
    if options.variants and not options.kjnodes:
        options.variants = [variant for variant in options.variants if variant != "kjnodes"]
    known = parts.LATENTS if options.what == "vae" else models.MODELS
    if unknown := set(options.models) - set(known):
        parser.error(f"--models {' '.join(sorted(unknown))}: must be of {', '.join(known)}")
    return options


def main() -> None:
    options = parse()
    (run_all if options.job is None else run_job)(options, WHAT[options.what])


if __name__ == "__main__":
    main()
