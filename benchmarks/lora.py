"""LoRA added, made stronger, swapped and removed, with weights that stay and weights that move: graphs, seconds, errors.

One process for each way in which ComfyUI can hold the weights of Flux; `python -m benchmarks.low_vram --make` first:
    python -m benchmarks.lora --host COMFYUI --vram dynamic --free 14
"""

import argparse
import json
import os

from . import low_vram, session, variants

RANK = 16
# (name, (LoRA, strength) or None)
STATES = [
    ("none", None),
    ("LoRA 1, 0.8", (1, 0.8)),
    ("LoRA 1, 1.2", (1, 1.2)),
    ("LoRA 2, 0.8", (2, 0.8)),
    ("removed", None),
]


def lora_weights(network, seed: int) -> dict:
    """Random LoRA for every matrix of the blocks, as a trainer saves it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in network.named_parameters():
        if name.endswith(".weight") and weight.dim() == 2 and any(part in name for part in ("blocks", "layers")):
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator).bfloat16() / 64
            found[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator).bfloat16() / 64
    return found


def measure(options) -> list[dict]:
    import comfy.sd
    import torch

    start = torch.cuda.mem_get_info()[0]
    patcher = comfy.sd.load_diffusion_model(str(low_vram.weights_file("flux")))
    loras = {seed: lora_weights(patcher.model.diffusion_model, seed) for seed in (1, 2)}
    ballast = torch.empty(int(start - options.free * low_vram.GIB) if options.free else 0, dtype=torch.uint8, device="cuda")
    ours = variants.apply("ours", patcher, session.KIT)
    common = {"kind": "lora", "vram": options.vram, "free_gib": options.free}
    session.sample(ours, "flux", options.steps)  # what a warmup does, without a LoRA
    rows = []
    for name, chosen in STATES:
        row = {**common, "state": name}
        latents = {}
        for variant, model in (("eager", patcher), ("ours", ours)):
            if chosen is not None:
                model, _ = comfy.sd.load_lora_for_models(model, None, loras[chosen[0]], chosen[1], 0)
            before = session.counts()
            latents[variant], steps = session.sample(model, "flux", options.steps)
            row[f"{variant}_step"] = round(session.median(steps[1:]), 4)
            row[f"{variant}_first"] = round(steps[0], 3)
            after = session.counts()
            if variant == "ours":
                row["graphs"] = after["graphs"] - before["graphs"]
                row["breaks"] = after["breaks"] - before["breaks"]
        row["error"] = round(session.relative_error(latents["ours"], latents["eager"]), 5)
        rows.append(row)
        print("ROW", json.dumps(row), flush=True)
    if options.runs:
        rows.append({**common, "state": f"{options.runs} runs", **_memory(ours, options)})
        print("ROW", json.dumps(rows[-1]), flush=True)
    del ballast
    return rows


def _memory(model, options) -> dict:
    """What many runs leave behind, in RAM and on the device (GiB after the second run and after the last)."""
    import torch

    values = []
    for _ in range(options.runs):
        session.sample(model, "flux", 2)
        free, total = torch.cuda.mem_get_info()
        values.append((_resident_gib(), (total - free) / low_vram.GIB))
    (ram, vram), (last_ram, last_vram) = values[1], values[-1]
    return {"ram_gib": [round(ram, 3), round(last_ram, 3)], "vram_gib": [round(vram, 3), round(last_vram, 3)]}


def _resident_gib() -> float:
    with open("/proc/self/status") as status:
        anonymous = next(line for line in status if line.startswith("RssAnon"))  # the mapped file of weights is not ours
    return int(anonymous.split()[1]) / 1024**2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--kjnodes")
    parser.add_argument("--vram", choices=["dynamic", "legacy"], default="dynamic")
    parser.add_argument("--free", type=float, default=0, help="GiB; 0 takes no memory away")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, default=0)
    options = parser.parse_args()
    session.enter(options.host, dynamic_vram=options.vram == "dynamic")
    measure(options)
    os._exit(0)


if __name__ == "__main__":
    main()
