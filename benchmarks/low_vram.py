"""Flux on smaller cards: memory is taken with plain allocations until so much is free.

One process a variant, all in one run on one machine:
    python -m benchmarks.low_vram --host COMFYUI --kjnodes FILE --out FOLDER
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from . import models, session, variants

GIB = 1024**3


def weights_file(name: str) -> Path:
    """The model's weights, in memory if the system has a place for that."""
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path.cwd()
    return folder / f"torch-compile-kit-{name}.safetensors"


def make_weights(name: str) -> None:
    import safetensors.torch
    import torch

    file = weights_file(name)
    if not file.exists():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        safetensors.torch.save_file(models.state_dict(name, device), str(file))
        print(f"made {file} {file.stat().st_size / GIB:.1f} GiB", flush=True)


def measure(options) -> list[dict]:
    """All amounts of free memory for one variant, largest first."""
    import comfy.model_management
    import comfy.sd
    import torch

    start = torch.cuda.mem_get_info()[0]
    patcher = comfy.sd.load_diffusion_model(str(weights_file(options.model)))
    settings = json.loads(options.settings)
    model = variants.apply(options.variant, patcher, session.KIT, options.kjnodes, **settings)
    ballast, rows = [], []
    for free in options.free:
        if free:
            # Counted from before the model was there: its own memory is what it must make do with.
            if not model.is_dynamic():  # nothing but the host's loader gives its memory back
                comfy.model_management.unload_all_models()
            torch.cuda.empty_cache()
            wanted = int(start - free * GIB) - sum(b.nbytes for b in ballast)
            ballast.append(torch.empty(wanted, dtype=torch.uint8, device="cuda"))
        row = {"variant": options.label or options.variant, "vram": options.vram, "free_gib": free}
        torch.cuda.reset_peak_memory_stats()
        try:
            before = session.counts()
            _, first = session.sample(model, options.model, options.steps)
            again = session.counts()
            latent, second = session.sample(model, options.model, options.steps)
            after = session.counts()
            row |= {
                "first_step": round(first[0], 3),
                "step": round(session.median(second[1:]), 4),
                "steps": [round(s, 4) for s in second],
                "graphs": again["graphs"] - before["graphs"],
                "breaks": again["breaks"] - before["breaks"],
                "graphs_in_second_run": after["graphs"] - again["graphs"],
            }
            row["used_gib"] = round(
                (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] - sum(b.nbytes for b in ballast)) / GIB, 2
            )
            reference = Path(f"/dev/shm/torch-compile-kit-{options.model}-{options.steps}.pt")
            if options.variant == "eager" and not reference.exists():
                torch.save(latent, reference)
            if reference.exists():
                row["error"] = round(session.relative_error(latent, torch.load(reference)), 5)
        except Exception as error:  # a peer that dies is a result
            row["died"] = f"{type(error).__name__}: {str(error)[:200]}"
            import traceback

            traceback.print_exc()
            rows.append(row)
            print("ROW", json.dumps(row), flush=True)
            break
        rows.append(row)
        print("ROW", json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes")
    parser.add_argument("--model", default="flux")
    parser.add_argument("--vram", choices=["dynamic", "legacy"], default="dynamic")
    parser.add_argument("--variant", choices=variants.VARIANTS)
    parser.add_argument("--label", default="")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--free", type=float, nargs="+", default=[0, 20, 14, 10, 8], help="GiB; 0 takes no memory away")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--make", action="store_true")
    options = parser.parse_args()
    session.enter(options.host, dynamic_vram=options.vram == "dynamic" and not options.make)
    if options.make:
        make_weights(options.model)
        return
    began = time.perf_counter()
    measure(options)
    print(f"{options.label or options.variant}: {time.perf_counter() - began:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
