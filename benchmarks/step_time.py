"""Seconds per step of real-size models, side by side: eager, core's node, KJNodes' node, ours.

Eager and ours take turns in one process; each peer has a process of its own, since peers change PyTorch and ComfyUI for good:
    python -m benchmarks.step_time --host COMFYUI --model flux --variant eager ours --noise
    python -m benchmarks.step_time --host COMFYUI --model flux --variant kjnodes --kjnodes FILE
"""

import argparse
import json
import os
import time
from pathlib import Path

from . import models, noise, session, variants


def measure(options) -> list[dict]:
    """One row a variant; several variants take turns on one model, so that a chip that gets warm slows all of them."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patcher = models.build(options.model, device)
    settings = json.loads(options.settings)
    rows, running, times, latents = {}, {}, {}, {}
    for variant in options.variant:
        before = session.counts()
        running[variant] = variants.apply(variant, patcher, session.KIT, options.kjnodes, **settings)
        time.sleep(options.head_start)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        latent, first = session.sample(running[variant], options.model, options.steps)
        latents[variant] = latent
        after = session.counts()
        label = options.label if options.label and variant == options.variant[-1] else variant
        rows[variant] = {
            "model": options.model,
            "variant": label,
            "settings": settings if variant == "ours" else {},
            "first_step": round(first[0], 3),
            "graphs": after["graphs"] - before["graphs"],
            "breaks": after["breaks"] - before["breaks"],
        }
        if variant == "ours" and options.head_start:
            rows[variant]["head_start"] = options.head_start
        if device.type == "cuda":
            rows[variant]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 1024**3, 2)
        reference = Path(options.references) / f"{options.model}-{options.steps}.pt"
        if label == "eager":
            torch.save(latent, reference)
        if reference.exists():
            rows[variant]["error"] = session.relative_error(latent, torch.load(reference))
        times[variant] = []
    warm = session.counts()
    for _ in range(options.rounds):
        for variant, model in running.items():
            times[variant] += session.sample(model, options.model, options.steps)[1][1:]
    for variant, row in rows.items():
        row["step"] = round(session.median(times[variant]), 5)
        row["fastest"] = round(min(times[variant]), 5)
        row["cold_start"] = round(row["first_step"] - row["step"], 2)
        row["graphs_in_warm_rounds"] = session.counts()["graphs"] - warm["graphs"]
    for size in options.more:
        width, height, frames = (*map(int, size.split("x")), 1)[:3]
        for variant, model in running.items():
            _, steps = session.sample(model, options.model, 4, size=(width, height, frames))
            more = {"size": size, "first": round(steps[0], 3), "step": round(session.median(steps[1:]), 5)}
            rows[variant].setdefault("more", []).append(more)
    if options.noise and "eager" in rows:  # last: what it loads would make the other variants' first steps shorter
        rows["eager"]["attention_noise"] = noise.attention_noise(
            patcher, options.model, options.steps, device.type, latents["eager"]
        )
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes")
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--variant", choices=variants.VARIANTS, nargs="+", default=["eager", "ours"])
    parser.add_argument("--label", default="")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--more", nargs="*", default=[], help="further sizes, WIDTHxHEIGHT[xFRAMES]")
    parser.add_argument("--head-start", type=float, default=0, help="seconds between node and sampler: text encoding")
    parser.add_argument("--noise", action="store_true", help="also eager with other attention kernels, into eager's row")
    parser.add_argument("--references", default="/tmp")
    options = parser.parse_args()
    session.enter(options.host)
    began = time.perf_counter()
    try:
        rows = measure(options)
    except Exception as error:  # a variant that dies is a result
        import traceback

        traceback.print_exc()
        rows = [{"model": options.model, "variant": options.label or options.variant[-1], "died": str(error)[:300]}]
    for row in rows:
        row["process_seconds"] = round(time.perf_counter() - began, 1)
        print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
