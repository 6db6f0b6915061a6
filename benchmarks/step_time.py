"""Seconds per step of real-size models, side by side: eager, core's node, KJNodes' node, ours.

Each (model, variant) is a process of its own, since peers change PyTorch and ComfyUI for good; all run on one machine:
    python -m benchmarks.step_time --host COMFYUI --kjnodes FILE --models flux sdxl --out FILE
"""

import argparse
import json
import os
import time
from pathlib import Path

from . import models, session, variants


def measure(options) -> dict:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patcher = models.build(options.model, device)
    settings = json.loads(options.settings)
    before = session.counts()
    variant = variants.apply(options.variant, patcher, session.KIT, options.kjnodes, **settings)
    row = {"model": options.model, "variant": options.label or options.variant, "settings": settings}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    latent, first = session.sample(variant, options.model, options.steps)
    row["first_step"] = round(first[0], 3)
    times = []
    for _ in range(options.rounds):
        latent, steps = session.sample(variant, options.model, options.steps)
        times += steps[1:]
    after = session.counts()
    row |= {
        "step": round(session.median(times), 5),
        "fastest": round(min(times), 5),
        "graphs": after["graphs"] - before["graphs"],
        "breaks": after["breaks"] - before["breaks"],
    }
    row["cold_start"] = round(row["first_step"] - row["step"], 2)
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 1024**3, 2)
    reference = Path(options.references) / f"{options.model}-{options.steps}.pt"
    if (options.label or options.variant) == "eager":
        torch.save(latent, reference)
    if reference.exists():
        row["error"] = round(session.relative_error(latent, torch.load(reference)), 5)
    for size in options.more:
        width, height, frames = (*map(int, size.split("x")), 1)[:3]
        _, steps = session.sample(variant, options.model, 4, size=(width, height, frames))
        row.setdefault("more", []).append(
            {"size": size, "first": round(steps[0], 3), "step": round(session.median(steps[1:]), 5)}
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes")
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--variant", choices=variants.VARIANTS, default="ours")
    parser.add_argument("--label", default="")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--more", nargs="*", default=[], help="further sizes, WIDTHxHEIGHT[xFRAMES]")
    parser.add_argument("--references", default="/tmp")
    options = parser.parse_args()
    session.enter(options.host)
    began = time.perf_counter()
    try:
        row = measure(options)
    except Exception as error:  # a variant that dies is a result
        import traceback

        traceback.print_exc()
        row = {"model": options.model, "variant": options.label or options.variant, "died": str(error)[:300]}
    row["process_seconds"] = round(time.perf_counter() - began, 1)
    print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
