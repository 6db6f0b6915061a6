"""One command for the whole table: every model in every variant, each in a process of its own, on this machine.

    python -m benchmarks.run --host COMFYUI --kjnodes FILE --out benchmarks/results/NAME.json [--models flux sdxl] [--low-vram]
    python -m benchmarks.tables

Peers change PyTorch and ComfyUI for good, hence the processes. Results of an earlier call in the same file are kept.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# model -> our best setting for it
BEST = {
    "flux": {"mode": "reduce-overhead"},
    "qwen_image": {"mode": "reduce-overhead"},
    "wan14": {},
    "z_image": {"mode": "reduce-overhead"},
    "hunyuan_video": {},
    "flux_fp8": {},
    "flux_fp8_scaled": {},
    "sdxl": {"mode": "reduce-overhead"},
    "sd15": {"mode": "reduce-overhead"},
}
LONG = {
    "wan14": ["--steps", "5", "--rounds", "1"],
    "hunyuan_video": ["--steps", "5", "--rounds", "1"],
    "qwen_image": ["--steps", "6", "--rounds", "1"],
}
# Seconds between the node and the sampler, as text encoding takes.
HEAD_START = 4
# (how the weights are held, GiB free)
LORA_MODES = [("legacy", "0"), ("dynamic", "0"), ("dynamic", "14"), ("legacy", "14")]


def jobs_of(model: str, variants: list[str]) -> list[tuple[list[str], dict]]:
    """(variants that share a process, settings)."""
    jobs = [([v for v in ("eager", "ours") if v in variants], BEST[model])]
    return [job for job in [*jobs, (["core"], {}), (["kjnodes"], {})] if job[0] and set(job[0]) <= set(variants)]


def run(command: list[str], timeout: int, own_cache: bool = True) -> list[dict]:
    """The rows that a process of our own prints.

    Args:
        own_cache: it compiles for itself, as on a new machine, in a place of its own.
    """
    print("+", " ".join(command[2:]), flush=True)
    try:
        with tempfile.TemporaryDirectory() as cache:
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"} if own_cache else {}
            result = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env={**os.environ, **own}
            )
        output = result.stdout
        if result.returncode or "ROW" not in output or '"died"' in output:
            print(output[-1500:], result.stderr[-1500:], flush=True)
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        print(f"stopped after {timeout} s", flush=True)
    rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    for row in rows:
        print("  ", json.dumps(row), flush=True)
    return rows


def environment(host: str, module: str = "benchmarks.run") -> dict:
    """What a results file says about the machine and the command that made it."""
    import torch

    version = {}
    exec((Path(host) / "comfyui_version.py").read_text(), version)  # noqa: S102  the host's own version file
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "comfyui": version["__version__"],
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }


def cpu_name() -> str:
    """This machine's processor and how many cores it has."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name or 'CPU'}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(BEST))
    parser.add_argument("--variants", nargs="*", default=["eager", "core", "kjnodes", "ours"])
    parser.add_argument("--noise", action="store_true", help="also eager with other attention kernels")
    parser.add_argument("--low-vram", action="store_true", help="Flux with little memory free, instead of the models")
    parser.add_argument("--lora", action="store_true", help="Flux with LoRA that come and go, instead of the models")
    parser.add_argument("--free", nargs="+", default=["0", "20", "14", "10", "8"])
    options = parser.parse_args()
    known = json.loads(options.out.read_text()) if options.out.exists() else {"environments": [], "rows": []}
    common = ["--host", options.host, "--kjnodes", options.kjnodes]
    if options.low_vram:
        module = [sys.executable, "-m", "benchmarks.low_vram", *common]
        subprocess.run([*module, "--make"], cwd=ROOT, check=True)
        jobs = [("eager", "eager", {}), ("core", "core", {}), ("kjnodes", "kjnodes", {})]
        jobs += [("ours", "ours, same attention", {"attention": "host"}), ("ours", "ours", {})]
        for vram in ("dynamic", "legacy"):
            free = options.free if vram == "dynamic" else ["14"]
            for variant, label, settings in jobs:
                if variant in options.variants and not (vram == "legacy" and variant == "core"):
                    arguments = ["--vram", vram, "--variant", variant, "--label", label, "--settings", json.dumps(settings)]
                    known["rows"] += [{"kind": "low_vram", **r} for r in run([*module, *arguments, "--free", *free], 150)]
    elif options.lora:
        module = [sys.executable, "-m", "benchmarks.low_vram", *common]
        subprocess.run([*module, "--make"], cwd=ROOT, check=True)
        for vram, free in LORA_MODES:
            runs = ["--runs", "20"] if (vram, free) == ("dynamic", "14") else []
            known["rows"] += run(
                [sys.executable, "-m", "benchmarks.lora", "--host", options.host, "--vram", vram, "--free", free, *runs], 200
            )
    else:
        module = [sys.executable, "-m", "benchmarks.step_time", *common]
        for model in options.models:
            for variants, settings in jobs_of(model, options.variants):
                arguments = ["--model", model, "--variant", *variants, "--settings", json.dumps(settings)]
                arguments += ["--noise"] if options.noise and "eager" in variants else []
                arguments += ["--head-start", str(HEAD_START)] if "ours" in variants else []
                known["rows"] += [{"kind": "step_time", **r} for r in run([*module, *arguments, *LONG.get(model, [])], 240)]
                save(options.out, known)
    # Last: a CUDA context in this process would count as used memory.
    known["environments"].append(environment(options.host))
    save(options.out, known)


def save(file: Path, known: dict) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
