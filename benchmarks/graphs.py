"""Many runs in `reduce-overhead`, LoRA and sizes taking turns: every latent against eager, and the memory they leave.

    python -m benchmarks.graphs --host COMFYUI --model sdxl --runs 50
With `--vram dynamic`, ComfyUI's default, the host's loader reads the weights from the file that
`python -m benchmarks.low_vram --model sdxl --make` has made.
"""

import argparse
import json
import os
from importlib import import_module

from . import lora, low_vram, models, session, variants

SIZES = {"sdxl": [(1024, 1024, 1), (1216, 832, 1), (768, 1344, 1)], "sd15": [(512, 512, 1), (768, 512, 1), (512, 768, 1)]}
# bf16 and fp16 kernels differ from eager's by less; a latent of another size, LoRA or seed by far more.
WRONG = 0.05


def measure(options) -> dict:
    import comfy.sd
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.vram == "dynamic":
        patcher = comfy.sd.load_diffusion_model(str(low_vram.weights_file(options.model)))
    else:
        patcher = models.build(options.model, device)
    loras = {seed: lora.lora_weights(patcher.model.diffusion_model, seed) for seed in (1, 2)}
    ours = variants.apply("ours", patcher, session.KIT, **json.loads(options.settings))

    def with_lora(model, chosen):
        return model if chosen is None else comfy.sd.load_lora_for_models(model, None, loras[chosen[0]], chosen[1], 0)[0]

    def run(model, index):
        size = SIZES[options.model][index % 3]
        chosen = lora.STATES[index // 3 % len(lora.STATES)][1]
        latent, seconds = session.sample(with_lora(model, chosen), options.model, options.steps, seed=index % 2, size=size)
        return latent, seconds[-1]

    reference = [run(patcher, index) for index in range(options.runs)]
    expected = [latent for latent, _ in reference]
    before = session.counts()
    errors, memory, last_steps = [], [], []
    for index in range(options.runs):
        latent, seconds = run(ours, index)
        errors.append(session.relative_error(latent, expected[index]))
        last_steps.append(seconds)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            memory.append(round((total - free) / 1024**3, 2))
    graphs = import_module(f"{session.KIT}.engine.cuda_graphs.capture").graphs_of(patcher.model.diffusion_model)
    first_round = 3 * len(lora.STATES)
    row = {
        "kind": "graphs",
        "model": options.model,
        "vram": options.vram,
        "settings": json.loads(options.settings),
        "runs": options.runs,
        "wrong": sum(error > WRONG for error in errors),
        "largest_error": round(max(errors), 5),
        "captured": graphs.captures,
        "replayed": graphs.replays,
        "least_difference_between_runs": round(
            min(session.relative_error(a, b) for a, b in zip(expected, expected[3:], strict=False) if a.shape == b.shape), 4
        ),
        "compiled": session.counts()["graphs"] - before["graphs"],
        "last_step": round(session.median(last_steps), 5),
        "eager_last_step": round(session.median([seconds for _, seconds in reference]), 5),
    }
    if memory:
        row["gib_after_first_round"] = max(memory[:first_round])
        row["gib_at_the_end"] = max(memory[first_round:] or memory)
    row["report"] = _notes(ours)
    return row


def _notes(patcher) -> list[str]:
    return import_module(f"{session.KIT}.engine.host.model.attach").notes_about(patcher)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="sdxl", choices=list(SIZES))
    parser.add_argument("--settings", default='{"mode": "reduce-overhead"}')
    parser.add_argument("--vram", choices=["off", "dynamic"], default="off", help="dynamic VRAM")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--runs", type=int, default=50)
    options = parser.parse_args()
    session.enter(options.host, dynamic_vram=options.vram == "dynamic")
    print("ROW", json.dumps(measure(options)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
